"""Photos of one color each with captions, for tests of the lab."""

from __future__ import annotations

import io

from PIL import Image

CAPTIONS = {
    "dog": ["A brown dog runs through the snow .", "The brown dog is running in snow", "A dog runs on a snowy hill ."],
    "bike": ["A man rides a bike down the street .", "A man on a bike on a road", "The man rides his red bike ."],
    "boat": ["Two men sit in a boat on the lake .", "Two men are sitting in a boat .", "Two men in a blue boat ."],
    "horse": ["A girl rides a white horse .", "The girl is riding a white horse on grass .", "A girl on a horse ."],
    "skateboard": ["A boy jumps on a skateboard .", "A boy is jumping with a skateboard .", "A skateboarder jumps ."],
    "bird": ["A white bird flies over water .", "A white bird above the ocean", "The bird is flying ."],
    "pool": ["A child jumps into a pool .", "A child is jumping into the pool .", "A kid swimming in the pool ."],
    "person": ["A woman talks to a woman .", "Two women are talking .", "Two women talk in a room ."],
}
COLORS = {name: (30 * number + 10, 250 - 25 * number, 60 + 90 * (number % 3)) for number, name in enumerate(CAPTIONS)}


def make_photo(name: str, number: int) -> tuple[str, bytes, list[str]]:
    """Return name, JPEG and captions; the color identifies the scene, since JPEG keeps plain colors nearly exactly."""
    file = io.BytesIO()
    Image.new("RGB", (72, 48) if number % 2 else (48, 64), COLORS[name]).save(file, "JPEG", quality=95)
    lines = CAPTIONS[name]
    return f"{name}-{number}.jpg", file.getvalue(), [*lines, lines[number % 3], lines[(number + 1) % 3]]


PHOTOS = [make_photo(name, number) for number in range(5) for name in CAPTIONS]
