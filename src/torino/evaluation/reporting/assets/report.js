const root = document.documentElement;
const prefersDark = matchMedia("(prefers-color-scheme: dark)").matches;

function setTheme(dark) {
  root.dataset.theme = dark ? "dark" : "light";
}

setTheme(location.hash === "#dark" || (location.hash !== "#light" && prefersDark));
document.getElementById("theme").onclick = () => setTheme(root.dataset.theme !== "dark");
document.getElementById("intervals").onchange = (event) => {
  document.body.classList.toggle("intervals", event.target.checked);
};

function sortKey(row, column) {
  const value = row.cells[column].dataset.value;
  if (value === "") return null;
  return isNaN(value) ? value : Number(value);
}

// Rows without a value come last in either direction.
function compare(a, b, ascending) {
  if (a === null || b === null) return (a === null) - (b === null);
  return (a < b ? -1 : a > b ? 1 : 0) * (ascending ? 1 : -1);
}

function sortTable(table, column) {
  const headings = [...table.tHead.rows[0].cells];
  const heading = headings[column];
  const order = heading.getAttribute("aria-sort");
  const ascending = order === "descending" || (column === 0 && order === null);
  headings.forEach((other) => other.removeAttribute("aria-sort"));
  heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
  const body = table.tBodies[0];
  [...body.rows]
    .map((row) => [sortKey(row, column), row])
    .sort(([a], [b]) => compare(a, b, ascending))
    .forEach(([, row]) => body.append(row));
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((heading, column) => {
    heading.classList.add("sortable");
    heading.tabIndex = 0;
    heading.onclick = () => sortTable(table, column);
    heading.onkeydown = (event) => {
      if (event.key === "Enter") sortTable(table, column);
    };
  });
}
