// Choose a photo: drop, paste, pick a file, or one of the collection.

import { useEffect, useRef, useState } from "preact/hooks";
import { forget, get, message, upload } from "./api";
import { Problem } from "./parts";
import type { Info, Photo, PhotoPage } from "./types";

interface Props {
  info: Info;
  photo: Photo | null;
  chosen: string;
  onChoose: (id: string, photo?: Photo) => void;
}

const PAGE = 12;

export function PhotoPicker({ info, photo, chosen, onChoose }: Props) {
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const [over, setOver] = useState(false);
  const [page, setPage] = useState<PhotoPage>(info.photos);
  const [search, setSearch] = useState("");
  const [offset, setOffset] = useState(0);
  const [last, setLast] = useState<Blob | null>(null);
  const input = useRef<HTMLInputElement>(null);

  const add = async (file: Blob, store = false) => {
    if (file.size > info.limits.bytes) {
      setProblem(`The photo has ${file.size.toLocaleString("en")} bytes; at most ${info.limits.bytes.toLocaleString("en")} are accepted.`);
      return;
    }
    setBusy(true);
    setProblem("");
    try {
      const added = await upload<Photo>(file, store);
      setLast(file);
      onChoose(added.id, added);
    } catch (error) {
      setProblem(message(error));
    } finally {
      setBusy(false);
    }
  };

  useEffect(() => {
    const onPaste = (event: ClipboardEvent) => {
      const file = [...(event.clipboardData?.files ?? [])].find((item) => item.type.startsWith("image/"));
      if (file) {
        event.preventDefault();
        void add(file);
      }
    };
    const onDragOver = (event: DragEvent) => {
      if (event.dataTransfer?.types.includes("Files")) {
        event.preventDefault();
        setOver(true);
      }
    };
    const onDragLeave = (event: DragEvent) => {
      if (!event.relatedTarget) setOver(false);
    };
    const onDrop = (event: DragEvent) => {
      setOver(false);
      const file = event.dataTransfer?.files[0];
      if (file) {
        event.preventDefault();
        void add(file);
      }
    };
    addEventListener("paste", onPaste);
    addEventListener("dragover", onDragOver);
    addEventListener("dragleave", onDragLeave);
    addEventListener("drop", onDrop);
    return () => {
      removeEventListener("paste", onPaste);
      removeEventListener("dragover", onDragOver);
      removeEventListener("dragleave", onDragLeave);
      removeEventListener("drop", onDrop);
    };
  });

  const turn = async (word: string, start: number) => {
    setSearch(word);
    setOffset(start);
    try {
      setPage(await get<PhotoPage>("/api/photos", { search: word, offset: start, limit: PAGE }));
    } catch (error) {
      setProblem(message(error));
    }
  };

  const drop = async () => {
    if (!photo) return;
    try {
      await forget(photo.id);
      onChoose(info.photos.photos[0]!.id);
    } catch (error) {
      setProblem(message(error));
    }
  };

  const own = photo?.id.startsWith("upload-");
  return (
    <div class={over ? "picker over" : "picker"}>
      <div class="strip" role="group" aria-label="Photos">
        <button type="button" class="add" onClick={() => input.current?.click()} disabled={busy}>
          <span aria-hidden="true">+</span>
          {busy ? "Reading …" : "Your photo"}
          <small>pick, drop or paste</small>
        </button>
        <input
          ref={input}
          type="file"
          class="hidden"
          tabIndex={-1}
          aria-label="Choose a photo file"
          accept="image/jpeg,image/png,image/webp,image/gif,image/bmp,image/tiff"
          onChange={(event) => {
            const file = event.currentTarget.files?.[0];
            if (file) void add(file);
            event.currentTarget.value = "";
          }}
        />
        {page.photos.map((entry) => (
          <button
            type="button"
            key={entry.id}
            class="thumbnail"
            aria-pressed={entry.id === chosen}
            title={entry.name}
            onClick={() => onChoose(entry.id)}
          >
            <img src={`/api/photos/${encodeURIComponent(entry.id)}/thumbnail`} alt={entry.name} loading="lazy" />
          </button>
        ))}
      </div>
      {info.photos.total > PAGE && (
        <div class="row">
          <input
            type="search"
            placeholder="Search photos by name"
            aria-label="Search photos by name"
            value={search}
            onInput={(event) => void turn(event.currentTarget.value, 0)}
          />
          <button type="button" class="quiet" disabled={!offset} onClick={() => void turn(search, Math.max(0, offset - PAGE))}>
            Previous
          </button>
          <button type="button" class="quiet" disabled={offset + PAGE >= page.total} onClick={() => void turn(search, offset + PAGE)}>
            Next
          </button>
          <span class="help">{page.total.toLocaleString("en")} photos</span>
        </div>
      )}
      <Problem text={problem} />
      {own && photo && (
        <p class="note">
          {photo.stored
            ? "Your photo is stored in torino's cache folder, so links to it keep working."
            : "Your photo is only in the memory of this computer, and is forgotten when the explorer stops."}{" "}
          {!photo.stored && last && info.edits && (
            <button type="button" class="link" onClick={() => void add(last, true)}>
              Store it so that links keep working
            </button>
          )}{" "}
          <button type="button" class="link" onClick={() => void drop()}>
            Forget it
          </button>
        </p>
      )}
      {photo?.notes.map((text) => (
        <p class="note" key={text}>
          {text}
        </p>
      ))}
    </div>
  );
}
