"""Damaged files that once ended in a traceback."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fuzz.test_run_files import resume_run, use_run, write_run
from tests.fuzz.test_training_files import resume_training, use_store, write_single_checkpoint, write_store
from tests.support.checkpoint_cases import C, D, parameter_weights, write_files
from tests.support.fuzzing import only_torino_errors
from tests.support.tiny_run import make_image
from torino import SAE
from torino.cli._common import parse_budgets, parse_pair, parse_shard
from torino.core.errors import BadFile, BadParameter, MissingSignal
from torino.core.io import read_json
from torino.core.tokens import load_tokens
from torino.evaluation.judge import _parse_reply, _ReplyError
from torino.evaluation.tasks import open_task
from torino.sae.formats._common import parse_block
from torino.vlm.hooks import signal_block

DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "cell", ["[" + "A" * 200, "[" + "A" * 200 + "]", DEEP, "a" * 5000 + ".png", "x\0y.png"], ids=lambda cell: cell[:5]
)
def test_a_row_with_an_unusable_image_is_skipped(tmp_path: Path, cell: str) -> None:
    image = base64.b64encode(make_image(0)).decode()
    rows = [["index", "image", "question", "answer"], ["0", image, "what ?", "a"], ["1", cell, "what ?", "a"]]
    (tmp_path / "X.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    task = open_task(tmp_path / "X.tsv")
    assert ([sample.index for sample in task], len(task.problems)) == (["0"], 1)


@pytest.mark.parametrize("image", [DEEP, '"' + "a" * 5000 + '.png"', '["\\ud800.png"]', "{}", "1e999"])
def test_a_line_with_an_unusable_image_is_skipped(tmp_path: Path, image: str) -> None:
    (tmp_path / "0.png").write_bytes(make_image(0))
    line = '{"index": %s, "image": %s, "question": "what ?", "answer": "a"}\n'
    (tmp_path / "X.jsonl").write_text(line % (0, '"0.png"') + line % (1, image))
    task = open_task(tmp_path / "X.jsonl")
    assert ([sample.index for sample in task], len(task.problems)) == (["0"], 1)


@pytest.mark.parametrize(
    "text", [DEEP, '{"a": ' * 100_000, "9" * 100_000, '{"a": "\\ud800"}', '{"a": 1, "a": 2}', "[]"]
)
def test_odd_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(BadFile, match=r"x\.json cannot be used: it .* Write it again"):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize("k", ["NaN", "Infinity", "-3", "1e400", '"3"', "[3]", "null", "true"])
def test_k_of_a_saelens_config(tmp_path: Path, k: str) -> None:
    config: dict[str, Any] = {"architecture": "topk", "d_in": D, "d_sae": C, "apply_b_dec_to_input": True}
    write_files(tmp_path, "sae_weights.safetensors", parameter_weights(), cfg=config)
    (tmp_path / "cfg.json").write_text(json.dumps(config)[:-1] + f', "k": {k}}}')
    with pytest.raises(BadFile, match=r"\bk\b"):
        SAE.load(tmp_path)


def test_a_lone_surrogate_in_the_reply_of_a_judge() -> None:
    reply = json.dumps({"choices": [{"message": {"content": "0.5 \ud800"}}]}).encode()
    with pytest.raises(_ReplyError, match="Unicode"):
        _parse_reply(reply)


@pytest.mark.parametrize("value", [None, [], {}, 3, "x", [[]], [None], [{}]])
@pytest.mark.parametrize("field", ["tasks", "settings", "saes", "versions", "model", "matched", "added", "limit"])
def test_every_field_of_a_run(tmp_path: Path, field: str, value: object) -> None:
    write_run(tmp_path)
    path = tmp_path / "run" / "run.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {field: value}))
    for use in (resume_run, use_run):
        with only_torino_errors():
            use(tmp_path)


@pytest.mark.parametrize("line", [b"{}", b"[]", b"null", b"\xff", b'{"task": 3}', DEEP.encode()], ids=range(6))
def test_a_bad_line_of_answers_is_named(tmp_path: Path, line: bytes) -> None:
    write_run(tmp_path)
    path = tmp_path / "run" / "answers" / "1of1.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    with pytest.raises(BadFile, match=r"1of1\.jsonl, line 1 cannot be used: .* Remove that line"):
        use_run(tmp_path)


@pytest.mark.parametrize("field", ["width", "photos", "photos_per_shard", "dtype", "tokens", "fingerprint"])
@pytest.mark.parametrize("value", [None, -1, 0, 10**30, [], "x", 1.5])
def test_every_field_of_the_card_of_a_store(tmp_path: Path, field: str, value: object) -> None:
    write_store(tmp_path)
    path = tmp_path / "card.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(BadFile):
        use_store(tmp_path)


def test_a_checkpoint_of_other_shapes_is_not_resumed(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_single_checkpoint(tmp_path)
    path = next((tmp_path / "training").glob("step-*"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("exp_avg"))
    save_file({**tensors, name: torch.zeros(1)}, path, {"format": "torino-training/1", "facts": "{}"})
    with pytest.warns(UserWarning, match="cannot be used .* training starts again"):
        resume_training(tmp_path)


def test_numbers_of_thousands_of_digits(tmp_path: Path) -> None:
    """Python refuses to convert them, with a ValueError."""
    digits = "9" * 5000
    np.savez(tmp_path / "tokens.npz", patches=np.zeros((4, 3), np.float32), block=np.array(digits))
    assert load_tokens(tmp_path / "tokens.npz")[0].origin.block is None
    assert parse_block(f"blocks.{digits}.hook_resid_post", None) is None
    for parse in (parse_pair, parse_shard, lambda text: parse_budgets("--budget", text)):
        for text in (digits, f"{digits},1", f"1/{digits}"):
            with pytest.raises(BadParameter, match="takes"):
                parse(text)
    with pytest.raises(MissingSignal, match="does not name a block"):
        signal_block(f"keys@{digits}", 0, 12)
