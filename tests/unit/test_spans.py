"""Texts of tokens, steps of answers, and spans of tokens of two tokenizers, on numbers worked out by hand."""

import numpy as np
import pytest
import torch
import torch_kit as kit
from episode_kit import byte_tokenizer
from torch.testing import assert_close

from hflow import Output, Sequences, nodes
from hflow.base.errors import DataError
from hflow.data.batches.batch import Column
from hflow.testing import CharacterTokenizer
from hflow.types import Unit

ANSWER = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "xé="}]


def test_where_texts_of_tokens_end(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    ids = tokenizer.encode("xé=\N{ROCKET}!")
    assert tokenizer.token_ends([*ids, *tokenizer.stop_ids]) == [1, -1, 2, 3, -1, -1, -1, 4, 5, 6]
    pad = tokenizer._hf.pad_token_id
    assert tokenizer.token_ends([ids[0], pad, ids[3], pad]) == [1, 1, 2, 2], (
        "they add no text, and end no turn"
    )
    cut = tokenizer.token_ends(ids[:-2])
    assert cut[:4] == [1, -1, 2, 3], "the text of a cut character is not known"
    assert tokenizer.token_ends([]) == []


def test_invalid_bytes_are_replaced_characters(tmp_path):
    tokenizer = byte_tokenizer(tmp_path)
    first_byte = tokenizer.encode("é")[0]
    ids = [*tokenizer.encode("a"), first_byte, *tokenizer.encode("b")]
    assert tokenizer.decode_answer(ids) == "a\ufffdb"
    assert tokenizer.token_ends(ids) == [1, 2, 3]


def test_the_last_tokens_of_steps():
    text = "one\n\n\n\ntwo\n\nthree"
    # Tokens: one | \n\n\n\nt | wo\n\n | th | ree | end
    ends, mask = [-1, -1, 3, 8, 12, 14, 17, 18], [False] * 2 + [True] * 6
    marks = nodes.step_ends(text, ends, mask)
    # The first step ends within the second token; the blank one after it does not count.
    assert [i for i, mark in enumerate(marks) if mark] == [3, 4, 6]
    assert not any(nodes.step_ends("", [-1, 1], [False, True]))
    assert nodes.step_ends("a;b", [1, 2, 3], [True] * 3, delimiter=";") == [False, True, True]


def test_scores_of_tokens_are_those_of_sequences_that_end_there():
    batch = kit.make_batch([9, 6])
    everything = batch.with_columns({"loss_mask": Column(Unit.TOKEN, np.ones(15, dtype=bool))})
    backend = kit.model(head="score")

    def by_token(out):
        return out.token_scores

    def by_sequence(out):
        return out.scores

    (tokens,) = backend.infer(kit.call(by_token, "token", []), [everything])
    found = tokens.columns["result"].values
    for row, start in ((0, 0), (1, 9)):
        for size in (2, 3, 6):
            ids = batch.columns["input_ids"].values[start : start + size]
            cut = type(batch)(
                np.array([row]),
                np.array([0]),
                np.array([size]),
                {
                    "input_ids": Column(Unit.TOKEN, ids),
                    "loss_mask": Column(Unit.TOKEN, np.ones(size, dtype=bool)),
                },
            )
            (one,) = backend.infer(kit.call(by_sequence, "sequence", []), [cut])
            assert one.columns["result"].values[0] == pytest.approx(found[start + size - 1], abs=1e-5)


def test_step_rewards():
    out = Output(token_scores=torch.tensor([0.0, 2.0, -1.0]))
    marked = torch.tensor([False, True, False])
    assert_close(nodes.step_inf(out, marked), torch.tensor([0.0, 2.0, 0.0]).sigmoid() * marked)
    assert_close(nodes.step_inf(out, marked, as_probability=False), torch.tensor([0.0, 2.0, 0.0]))


def test_tokens_are_aligned_by_their_text(tmp_path):
    # The student's tokens: x | é= and the end. The teacher's: bytes, of which é has two.
    teacher = byte_tokenizer(tmp_path)
    view, spans = nodes.aligned_view(teacher, ANSWER, "xé=", [-1, 1, 3, 4], [False, True, True, True])
    prompt = len(teacher.encode_prompt("a?"))
    assert spans == {"student": [1, 2, 3, 4], "teacher": [prompt + i for i in (0, 1, 4, 5)]}
    assert [i for i, x in enumerate(view.loss_mask) if x] == list(range(prompt, prompt + 5))
    # The student was cut: the end of the teacher's turn is in no span.
    _, spans = nodes.aligned_view(teacher, ANSWER, "xé=", [-1, 1, 3], [False, True, True])
    assert spans == {"student": [1, 2, 3], "teacher": [prompt + i for i in (0, 1, 4)]}


@pytest.mark.parametrize(
    ("completion", "ends", "message"),
    [
        ("xé\ufffd", [-1, 1, 2, 3], "no whole characters"),
        ("xé=", [-1, -1, -1, -1], "no whole characters"),
        ("a\x03b", [-1, 1, 2, 3], "the teacher's tokens make 'ab' of the answer"),
    ],
)
def test_what_cannot_be_aligned_is_refused(completion, ends, message):
    with pytest.raises(DataError, match=message):
        nodes.aligned_view(CharacterTokenizer(), ANSWER, completion, ends, [False, True, True, True])


def test_advantages_of_spans():
    seqs = Sequences.of([4, 3], loss_mask=[False, True, True, True, False, True, True])
    student = torch.tensor([0.0, -1.0, -2.0, -0.5, 0.0, -3.0, -1.0])
    spans = [{"student": [1, 3, 4], "teacher": [2, 3, 5]}, {"student": [1, 2, 3], "teacher": [1, 3, 4]}]
    own = Sequences.of([5, 4])
    out = Output(logprobs=torch.tensor([0.0, 0.0, -1.0, -2.0, -4.0, 0.0, -0.25, -0.5, -1.5]))
    sums = nodes.span_inf(out, spans, own)
    assert sums == [{"logprobs": [-1.0, -6.0]}, {"logprobs": [-0.75, -1.5]}]
    advantages, metrics = nodes.span_advantage(student, spans, sums, seqs)
    # -1 + 3 = 2 for a span of two tokens, -6 + 0.5, -0.75 + 3, -1.5 + 1.
    assert_close(advantages, torch.tensor([0.0, 2.0, 2.0, -5.5, 0.0, 2.25, -0.5]))
    assert_close(metrics["reverse_kl"], torch.tensor([0.0, -1.0, -1.0, 5.5, 0.0, -2.25, 0.5]))
    assert metrics["tokens_of_span"].tolist() == [0, 2, 2, 1, 0, 1, 1]
