"""Make the clip of the documentation from the bundled photos: a pan, a zoom, still scenes and cuts.

``python scripts/make_clip.py clip.mp4`` writes a video (needs torino[video]); a folder gets its frames as PNG files.
``torino look clip.mp4`` draws it. Used by docs/guides/video.md:

    python scripts/make_clip.py build/clip
    torino look build/clip --fps 5 --kd 2,2 -o docs/images/video.png
    torino look build/clip --fps 5 --kd 2,2 -o docs/images/video.webp
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from torino.core.extras import optional_import
from torino.datasets.bundled import example_folder
from torino.datasets.camera import Shot, make_clip
from torino.datasets.video import Video

SHOTS = (  # photo, seconds, first and last window
    ("coffee", 1.6, (0.5, 0.5, 1.0), None),
    ("rocket", 1.6, (0.3, 0.6, 0.6), (0.7, 0.6, 0.6)),
    ("chelsea", 1.6, (0.5, 0.5, 1.0), (0.45, 0.45, 0.45)),
    ("astronaut", 1.6, (0.5, 0.5, 1.0), None),
)


def film(fps: float = 5.0, side: int = 336) -> Video:
    """Return the clip."""
    photos = example_folder() / "photos"
    return make_clip([Shot(photos / f"{name}.jpg", *shot) for name, *shot in SHOTS], fps=fps, side=side)


def write_video(clip: Video, path: Path) -> None:
    """Write a clip as MPEG-4."""
    with optional_import("Writing videos needs", "torino[video]"):
        import av
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=round(clip.rate))
        stream.width, stream.height = clip.frames[0].size
        stream.pix_fmt = "yuv420p"
        for frame in clip.frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(frame), format="rgb24")))
        container.mux(stream.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="a video file, or a folder for the frames")
    parser.add_argument("--fps", type=float, default=5.0)
    parser.add_argument("--side", type=int, default=336)
    given = parser.parse_args()
    clip = film(given.fps, given.side)
    if given.output.suffix:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        write_video(clip, given.output)
    else:
        given.output.mkdir(parents=True, exist_ok=True)
        for number, frame in enumerate(clip.frames):
            frame.save(given.output / f"{number:03d}.png")
    print(f"{clip!r}: {given.output}")


if __name__ == "__main__":
    main()
