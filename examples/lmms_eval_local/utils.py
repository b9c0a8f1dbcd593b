"""Read the image and the question of a row."""


def doc_to_visual(doc):
    """Return the images of a row."""
    return [doc["image"].convert("RGB")]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    """Return the question of a row."""
    return doc["question"]
