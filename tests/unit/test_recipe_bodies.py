"""Bodies of the shipped recipes, called as functions, against the papers' formulas."""

import asyncio
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from hflow.dsl import load_recipe
from hflow.testing import ScriptedEngine
from hflow.types import Output
from hflow.types.node_setup import setup_of

RECIPES = Path(__file__).parents[2] / "recipes"


def body(recipe: str, node: str) -> Any:
    return load_recipe(RECIPES / f"{recipe}.py").bodies()[node]


def test_dapo_adds_the_overlong_punishment_and_masks_what_was_cut_off():
    shaped = body("dapo", "shaped")
    assert shaped(1.0, -0.25, "stop") == (0.75, True)
    assert shaped(0.0, -1.0, "length") == (-2.0, False)


@pytest.mark.parametrize(
    ("right", "keep"), [([1.0, 0.0], True), ([0.0, 0.0], False), ([1.0, 1.0, 1.0], False)]
)
def test_dapo_keeps_groups_that_are_neither_all_right_nor_all_wrong(right, keep):
    # DAPO, equation 11: 0 < number of right answers < G.
    assert body("dapo", "has_spread")(right) is keep


def test_remax_subtracts_the_greedy_reward():
    reward, greedy = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 0.0])
    assert body("remax", "above_greedy")(reward, greedy).tolist() == [0.0, -1.0, 1.0]


def test_distillation_prefers_what_the_teacher_finds_likelier():
    # The student gives the tokens 0.5 and 0.25, the teacher 0.25 and 0.5: reverse KL log 2 and -log 2.
    student, teacher = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    advantages, metrics = body("distill", "nearer_to_teacher")(student, teacher)
    log2 = torch.log(torch.tensor(2.0))
    assert_close(advantages, torch.stack([-log2, log2]))
    assert_close(metrics["reverse_kl"], -advantages)


def test_an_answer_without_an_end_earns_nothing_in_ppo():
    score = body("ppo", "score")
    assert score("042", "042", "stop") == 1.0
    assert score("042", "042", "length") == score("043", "042", "stop") == 0.0


def test_a_reward_model_is_right_where_the_chosen_scores_higher():
    accuracy = body("reward_model", "prefers_chosen")
    assert [accuracy([2.0, 1.0]), accuracy([1.0, 2.0]), accuracy([1.0, 1.0])] == [1.0, 0.0, 0.0]


def test_a_teacher_moves_by_one_minus_its_decay():
    follow = body("custom/ema_teacher", "follow")
    assert_close(follow(torch.tensor([1.0]), torch.tensor([3.0]), decay=0.75), torch.tensor([1.5]))


def test_retrieval_puts_the_most_similar_text_in_front_of_the_prompt():
    answer_gen = body("custom/retrieval", "answer_gen")
    setup_of(answer_gen)()
    engine = ScriptedEngine(["042"])
    asyncio.run(answer_gen(engine=engine, prompt="17+25="))
    assert engine.prompts == ["10+20=03017+25="]


def test_an_index_ranks_texts_by_the_cosine_of_their_tf_idf():
    load_recipe(RECIPES / "custom" / "retrieval.py")
    index = sys.modules["text_index"].TextIndex(["ab", "ac", "bb"])
    # Terms are ^a, ab | ^a, ac | ^b, bb: the first two texts share ^a, with idf log(1 + 3/2).
    shared, own = math.log(1 + 3 / 2), math.log(1 + 3 / 1)
    length = math.hypot(shared, own)
    assert dict(index._weights["^a"]) == pytest.approx({0: shared / length, 1: shared / length})
    assert index.search("ab", top=3) == ["ab", "ac"]


def test_replay_returns_what_it_kept_as_written_with_its_old_log_probs():
    answer_gen = load_recipe(RECIPES / "custom" / "replay.py").bodies({"answer_gen": {"share": 1.0}})[
        "answer_gen"
    ]
    setup_of(answer_gen)()
    engine = ScriptedEngine(["042", "043"], logprob=-0.5, version=3)
    first, second, other = (
        asyncio.run(answer_gen(engine=engine, prompt=prompt)) for prompt in ("17+25=", "17+25=", "18+25=")
    )
    assert [replayed for _, replayed in (first, second, other)] == [False, True, False]
    assert second[0].input_ids == first[0].input_ids
    assert second[0].behav_logprobs == first[0].behav_logprobs
    assert set(second[0].versions) == {-1}
    assert other[0].completion == "043"


def test_examples_have_the_supervised_loss_and_others_that_of_reinforcement_learning():
    train = body("custom/sft_rl", "actor_train")
    theta, behav = torch.tensor([-1.0, -2.0, -1.5]), torch.tensor([-1.0, -2.0, 0.0])
    advantages, is_example = torch.tensor([2.0, -1.0, 5.0]), torch.tensor([False, False, True])
    loss, metrics = train(
        out=Output(logprobs=theta),
        behav_logprobs=behav,
        advantages=advantages,
        is_example=is_example,
        clip=0.2,
    )
    assert_close(loss, torch.tensor([-2.0, 1.0, 0.5 * 1.5]))  # ratio 1; then sft_weight * -log p
    assert metrics["example_share"] is is_example
