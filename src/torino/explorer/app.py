"""The HTTP interface of the explorer. ``/api/openapi.json`` describes it; the page in ``assets`` uses nothing else."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, cast

from torino.core.errors import TorinoError
from torino.core.extras import optional_import

with optional_import("torino explore needs", "torino[serve]"):
    from fastapi import APIRouter, FastAPI, Header, Query, Request
    from fastapi.concurrency import run_in_threadpool
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from pydantic import BaseModel, ConfigDict, Field

from torino.explorer.answers import AnswerRequest, AnswerStreams
from torino.explorer.atlas import THUMBNAIL, ConceptAtlas, ConceptSort
from torino.explorer.export import export_html, export_png
from torino.explorer.gate import ExplorerGate
from torino.explorer.model import MAX_SPEC, ExplorerModel, InspectedPhoto
from torino.explorer.naming import check_renaming, rename_concept
from torino.explorer.options import ExplorerOptions
from torino.explorer.photos import PhotoLibrary, encode_sample
from torino.explorer.runs import RunBrowser, SampleFilter
from torino.explorer.views import PhotoView, ReductionView, TokenView, view_photo, view_reduction, view_token
from torino.interpret.sheet import resize_longest_side
from torino.serving.server.errors import ApiError, bad_request, from_torino
from torino.serving.server.gate import ServerState
from torino.version import __version__

PAGES = ("/", "/inspect", "/compare", "/atlas", "/runs", "/api")
MEDIA = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
DEFAULT_SPEC = "torino-m(k=2, delta=2)"

Spec = Annotated[str, Query(alias="by", max_length=MAX_SPEC, description="A method, such as torino-m(k=2, delta=2).")]
Page = Annotated[int, Query(ge=0, le=10_000_000, description="First entry.")]
Size = Annotated[int, Query(ge=1, le=200, description="Most entries.")]


class RenameRequest(BaseModel):
    """Another name of a concept; empty restores the automatic one."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=400)


@dataclass(frozen=True, eq=False)
class Explorer:
    """The parts of an explorer.

    Attributes
    ----------
    model : ExplorerModel
    library : PhotoLibrary
    runs : sequence of RunBrowser
    atlas : ConceptAtlas or None
        None without an SAE.
    options : ExplorerOptions
    """

    model: ExplorerModel
    library: PhotoLibrary
    runs: Sequence[RunBrowser]
    atlas: ConceptAtlas | None
    options: ExplorerOptions

    def photo(self, photo: str) -> InspectedPhoto:
        """Return a photo, encoded if it is not yet."""
        return self.model.encode(photo, self.library.open)

    def known_atlas(self) -> ConceptAtlas:
        """Return the atlas, or refuse."""
        if self.atlas is None:
            raise ApiError(404, "There is no SAE, so there are no concepts. Start with --sae FOLDER.", "atlas")
        return self.atlas

    def run(self, number: int) -> RunBrowser:
        """Return a run, or refuse."""
        if not 0 <= number < len(self.runs):
            raise ApiError(404, f"There is no run {number}; {len(self.runs)} were opened with --run FOLDER.", "run")
        return self.runs[number]


def photo_routes(explorer: Explorer, answers: AnswerStreams) -> APIRouter:
    """Build the routes of photos, reductions and answers."""
    router, model, library = APIRouter(prefix="/api", tags=["photos"]), explorer.model, explorer.library

    def describe(photo: InspectedPhoto) -> PhotoView:
        return view_photo(photo, model.names, library.is_stored(photo.photo.id))

    @router.get("/photos")
    def list_photos(
        search: Annotated[str, Query(max_length=200)] = "", offset: Page = 0, limit: Size = 60
    ) -> dict[str, Any]:
        """List the photos that can be picked."""
        return library.list(search, offset, limit)

    @router.post("/photos", responses={200: {"model": PhotoView}}, response_model=None)
    async def add_photo(request: Request, x_torino_store: Annotated[str, Header()] = "no") -> Response:
        """Send a photo as the body. It stays in memory, and is written to disk only with ``X-Torino-Store: yes``."""
        data = await request.body()

        def add() -> PhotoView:
            photo = library.add(data, store=x_torino_store == "yes")
            return describe(model.encode(photo.id, lambda _: photo))

        return JSONResponse(await _in_thread(add))

    @router.get("/photos/{photo}", responses={200: {"model": PhotoView}}, response_model=None)
    def get_photo(photo: str) -> Response:
        """Return the grid of a photo and the concepts of its patches; the tower and the SAE run once."""
        return JSONResponse(cast(Any, describe(explorer.photo(photo))))

    @router.delete("/photos/{photo}")
    def forget_photo(photo: str) -> dict[str, str]:
        """Forget a photo that was sent, in memory and on disk."""
        library.forget(photo)
        model.forget(photo)
        return {"forgotten": photo}

    @router.get("/photos/{photo}/image", response_class=Response)
    def get_image(photo: str) -> Response:
        """Return the photo as the tower sees it, as JPEG."""
        file = io.BytesIO()
        explorer.photo(photo).seen.save(file, "JPEG", quality=90)
        return Response(file.getvalue(), media_type="image/jpeg")

    @router.get("/photos/{photo}/thumbnail", response_class=Response)
    def get_thumbnail(photo: str) -> Response:
        """Return a small JPEG of a photo; neither the tower nor the SAE runs."""
        file = io.BytesIO()
        resize_longest_side(library.open(photo).image, THUMBNAIL).save(file, "JPEG", quality=82)
        headers = {"Cache-Control": "private, max-age=600"}
        return Response(file.getvalue(), media_type="image/jpeg", headers=headers)

    @router.get("/photos/{photo}/reduction", responses={200: {"model": ReductionView}}, response_model=None)
    def get_reduction(photo: str, by: Spec = DEFAULT_SPEC) -> Response:
        """Return the tokens of a photo under a method: groups, concepts and sizes."""
        found = explorer.photo(photo)
        reduction, seconds = model.plan(found, by)
        return JSONResponse(cast(Any, view_reduction(reduction, by, seconds)))

    @router.get("/photos/{photo}/tokens/{token}", responses={200: {"model": TokenView}}, response_model=None)
    def get_token(photo: str, token: int, by: Spec = DEFAULT_SPEC) -> Response:
        """Explain one token: its sources, their weights, and what it stands for."""
        reduction, _ = model.plan(explorer.photo(photo), by)
        return JSONResponse(cast(Any, view_token(reduction, token, model.names)))

    @router.post("/photos/{photo}/answers", response_class=StreamingResponse)
    async def ask(photo: str, wanted: AnswerRequest) -> Response:
        """Ask a question; the answers of all methods are streamed as one JSON object per line."""
        found = await _in_thread(lambda: explorer.photo(photo))
        return StreamingResponse(answers.stream(found, wanted), media_type="application/x-ndjson")

    @router.get("/photos/{photo}/export.{kind}", response_class=Response)
    def export(photo: str, kind: str, by: Spec = DEFAULT_SPEC) -> Response:
        """Export a photo and its tokens as one HTML file (``html``) or as a picture (``png``)."""
        if kind not in ("html", "png"):
            raise bad_request(f"A photo is exported as html or png, got {kind[:20]!r}.")
        found = explorer.photo(photo)
        reduction, _ = model.plan(found, by)
        names = dict(model.names)
        content = (
            export_png(found, reduction, names)
            if kind == "png"
            else export_html(found, reduction, names, model.name).encode()
        )
        headers = {"Content-Disposition": f'attachment; filename="torino-{_safe_name(found.photo.name)}.{kind}"'}
        media = "image/png" if kind == "png" else "text/html; charset=utf-8"
        return Response(content, media_type=media, headers=headers)

    return router


def concept_routes(explorer: Explorer) -> APIRouter:
    """Build the routes of the concept atlas."""
    router = APIRouter(prefix="/api", tags=["concepts"])

    @router.get("/concepts")
    def list_concepts(
        search: Annotated[str, Query(max_length=200)] = "",
        sort: ConceptSort = "specificity",
        level: Annotated[int | None, Query(ge=0, le=64)] = None,
        offset: Page = 0,
        limit: Size = 60,
    ) -> dict[str, Any]:
        """List the concepts that fire on the photos of the atlas, by name or number."""
        return explorer.known_atlas().list(search, sort, level, offset, limit)

    @router.get("/concepts/tree")
    def get_roots() -> dict[str, Any]:
        """Return the concepts of the first Matryoshka level."""
        return {"concepts": explorer.known_atlas().roots()}

    @router.get("/concepts/{concept}")
    def get_concept(concept: int) -> dict[str, Any]:
        """Describe a concept: statistics, top photos and patches, neighbors, place in the tree."""
        return explorer.known_atlas().describe(concept)

    @router.get("/concepts/{concept}/tree")
    def get_branches(concept: int) -> dict[str, Any]:
        """Return the concepts of the next Matryoshka level below a concept."""
        return {"concepts": explorer.known_atlas().branches(concept)}

    @router.patch("/concepts/{concept}")
    def rename(concept: int, wanted: RenameRequest) -> dict[str, Any]:
        """Rename a concept beside the SAE, for all commands; an empty name restores the automatic one."""
        if not explorer.options.edits:
            raise ApiError(403, "Renaming is turned off: the explorer was started with --read-only.", "edits")
        atlas = explorer.known_atlas()
        return {"id": concept, "name": rename_concept(atlas.sae, concept, wanted.name)}

    @router.get("/atlas")
    def get_status() -> dict[str, Any]:
        """Return how far the atlas is."""
        return explorer.known_atlas().status()

    @router.get("/atlas/photos/{photo}/image", response_class=Response)
    def get_thumbnail(photo: int) -> Response:
        """Return a photo of the atlas as a small JPEG."""
        headers = {"Cache-Control": "private, max-age=3600"}
        return Response(explorer.known_atlas().thumbnail(photo), media_type="image/jpeg", headers=headers)

    return router


def run_routes(explorer: Explorer) -> APIRouter:
    """Build the routes of evaluation runs."""
    router = APIRouter(prefix="/api/runs", tags=["runs"])

    @router.get("")
    def list_runs() -> dict[str, Any]:
        """List the runs."""
        return {"runs": [{"number": number, **run.summary()} for number, run in enumerate(explorer.runs)]}

    @router.get("/{run}")
    def get_run(run: int) -> dict[str, Any]:
        """Return the facts of a run, its settings and how far it is."""
        return {"number": run, **explorer.run(run).summary()}

    @router.get("/{run}/samples")
    def list_samples(
        run: int,
        task: Annotated[str, Query(max_length=200)] = "",
        method: Annotated[str, Query(max_length=100)] = "",
        budget: Annotated[str, Query(max_length=40)] = "",
        correct: bool | None = None,
        lost: Annotated[str, Query(max_length=300, description="A setting that answers wrongly.")] = "",
        kept: Annotated[str, Query(max_length=300, description="A setting that answers correctly.")] = "",
        search: Annotated[str, Query(max_length=200)] = "",
        offset: Page = 0,
        limit: Size = 60,
    ) -> dict[str, Any]:
        """List samples by task, method, budget and correctness, or those that one setting loses and another keeps."""
        wanted = SampleFilter(task, method, budget, correct, lost, kept, search)
        return explorer.run(run).samples(wanted, offset, limit)

    @router.get("/{run}/sample")
    def get_sample(
        run: int, task: Annotated[str, Query(max_length=200)], index: Annotated[str, Query(max_length=400)]
    ) -> dict[str, Any]:
        """Return one sample with the answers of all settings; ``photo`` is the id of its photo."""
        return {"photo": encode_sample(run, task, index), **explorer.run(run).sample(task, index)}

    return router


def build_app(explorer: Explorer, state: ServerState) -> Any:
    """Build the application."""
    answers = AnswerStreams(explorer.model, explorer.options.max_tokens)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncGenerator[None]:
        if explorer.atlas is not None:
            explorer.atlas.start()
        yield
        answers.close()
        if explorer.atlas is not None:
            explorer.atlas.stop()

    app = FastAPI(
        title="torino explorer",
        version=__version__,
        description="See why a visual token survived.",
        lifespan=life,
        docs_url=None,  # these pages load scripts of other servers; the explorer has its own
        redoc_url=None,
        openapi_url="/api/openapi.json",
    )
    for router in (
        _main_routes(explorer),
        photo_routes(explorer, answers),
        concept_routes(explorer),
        run_routes(explorer),
    ):
        app.include_router(router)
    for path in PAGES:
        app.add_api_route(path, _page, include_in_schema=False, response_class=Response)
    app.add_api_route("/health", _health, tags=["explorer"])
    app.add_api_route("/assets/{name}", _asset, include_in_schema=False, response_class=Response)

    async def refuse(request: Request, error: Exception) -> Response:
        if isinstance(error, RequestValidationError):
            first: Any = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"][1:]) or "the request"
            refused = bad_request(f"{field[:80]} cannot be used: {first['msg']}.")
        elif isinstance(error, TorinoError):
            refused = from_torino(error)
        else:
            status = int(getattr(error, "status_code", 404))
            refused = ApiError(status, f"There is no {request.url.path[:100]}.", "path")
        return JSONResponse(refused.to_dict(), refused.status, refused.headers)

    for kind in (RequestValidationError, TorinoError, 404, 405):
        app.add_exception_handler(kind, refuse)
    app.add_middleware(cast(Any, ExplorerGate), options=explorer.options, state=state)
    return app


def _main_routes(explorer: Explorer) -> APIRouter:
    router, model = APIRouter(prefix="/api", tags=["explorer"]), explorer.model

    @router.get("/info")
    def get_info() -> dict[str, Any]:
        """Return the model, its SAE, the methods, and what this explorer allows."""
        sae = model.sae
        allowed = explorer.options.edits
        return {
            "version": __version__,
            "model": model.name,
            "methods": model.methods(),
            "default": DEFAULT_SPEC if sae is not None else "torino-m(k=2, delta=1)",
            "sae": None
            if sae is None
            else {
                "name": sae.card.name or "SAE",
                "kind": sae.kind,
                "latents": sae.latents,
                "levels": list(sae.groups),
                "names": len(sae.names),
                "read_only": check_renaming(sae) if allowed else "The explorer was started with --read-only.",
            },
            "photos": explorer.library.list(limit=12),
            "own_photos": explorer.library.collection is not None,
            "runs": len(explorer.runs),
            "edits": allowed,
            "limits": {"bytes": explorer.options.max_bytes, "pixels": explorer.options.max_pixels},
        }

    return router


async def _health() -> dict[str, str]:
    """Return 200 while the explorer works."""
    return {"status": "ok", "version": __version__}


async def _page() -> Response:
    return _send("index.html")


async def _asset(name: str) -> Response:
    return _send(name)


def _send(name: str) -> Response:
    """Return a file of the built page."""
    folder = files("torino.explorer") / "assets"
    suffix = Path(name).suffix
    if suffix not in MEDIA or name not in {item.name for item in folder.iterdir()}:
        raise ApiError(404, f"There is no {name[:60]}.", "path")
    headers = {"Cache-Control": "no-cache"}
    return Response((folder / name).read_bytes(), media_type=MEDIA[suffix], headers=headers)


async def _in_thread(work: Any) -> Any:
    return await run_in_threadpool(work)


def _safe_name(name: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else "-" for c in name)[:60].strip("-") or "photo"
