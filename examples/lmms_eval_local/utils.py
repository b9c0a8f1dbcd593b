"""What the task asks of a row: its picture and its question."""


def doc_to_visual(doc):
    """The pictures of a row."""
    return [doc["image"].convert("RGB")]


def doc_to_text(doc, lmms_eval_specific_kwargs=None):
    """The question of a row."""
    return doc["question"]
