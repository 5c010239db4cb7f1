"""Held-out questions: who may be asked what, and how a loss of F1 is measured. Tiny models say nonsense, reproducibly."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tiny_models import save_perturbed_copy, save_tiny_model

from scd_trt import translator as translators
from scd_trt.config import CorpusConfig, HeldoutConfig, MethodConfig, ModelConfig, PairConfig
from scd_trt.corpus import split_of
from scd_trt.distill.answers import AnswersError, Asked, QuestionBench, read_questions
from scd_trt.distill.assembly import assemble
from scd_trt.distill.plan import Job, prepare
from scd_trt.evaluate.generation import greedy
from scd_trt.evaluate.tasks import TaskError
from scd_trt.kv_cache import num_sent_blocks
from scd_trt.models import cache_layers, load_model, load_tokenizer, trace
from scd_trt.translator import RawLayer

BLOCK = 8
PASSAGES = [f"story {number} of a river and a house" for number in range(200)]
HELDOUT = [text for text in PASSAGES if split_of(text) == "heldout"]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    producer = save_tiny_model(root / "a")
    return producer, save_perturbed_copy(producer, root / "b", scale=0.3)


def _job(models: tuple[Path, Path], questions: str, number: int = 4) -> Job:
    config = PairConfig(
        name="tiny",
        producer=ModelConfig(model=str(models[0]), dtype="float32"),
        consumer=ModelConfig(model=str(models[1]), dtype="float32"),
        method=MethodConfig(policy="exact"),
        calibration=CorpusConfig(source="/nowhere"),
        heldout=HeldoutConfig(source="/nowhere", questions=questions, num_questions=number),
    )
    return prepare(config.model_copy(update={"engine": config.engine.model_copy(update={"tokens_per_block": BLOCK})}))


def _file(path: Path, *rows: object) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return str(path)


def _rows(passages: list[str]) -> list[dict[str, object]]:
    return [{"passage": text, "question": "What \n is it?", "answer": ["a river", "house"]} for text in passages]


def test_questions_of_a_file_are_cut_as_prompts_are_served(models, tmp_path):
    source = _file(tmp_path / "q.jsonl", *_rows(PASSAGES), "")
    job, tokenizer = _job(models, source), load_tokenizer(models[1])
    asked = read_questions(job, tokenizer)
    assert len({question.document for question in asked}) == 4
    assert asked == read_questions(job, tokenizer)
    for question in asked:
        text = tokenizer.decode(question.prefix_ids + question.tail_ids)
        assert any(f"{passage}\n\nQuestion: What is it?" in text for passage in HELDOUT)
        assert text.endswith("<|turn|>assistant\n")
        length = len(question.prefix_ids) + len(question.tail_ids)
        assert len(question.prefix_ids) == num_sent_blocks(length, BLOCK) * BLOCK
        assert question.answers == ("a river", "house")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"q\.jsonl:1: expected an object with passage, question and answer"),
        ([1], r"q\.jsonl:1: expected an object"),
        ({"passage": "a", "question": "b"}, r"expected an object .*'answer'"),
        ({"passage": "a", "question": 1, "answer": "c"}, r"q\.jsonl:1: passage, question and answers must be text"),
        ({"passage": "a", "question": "b", "answer": []}, "at least one answer"),
        (
            {"passage": HELDOUT[0], "question": "b", "answer": "c"},
            "holds 1 questions, heldout.num_questions asks for 4",
        ),
    ],
)
def test_files_that_hold_no_questions_are_explained(models, tmp_path, row, message):
    with pytest.raises(AnswersError, match=message):
        read_questions(_job(models, _file(tmp_path / "q.jsonl", row)), load_tokenizer(models[1]))


def test_missing_files_and_tasks_are_named(models, tmp_path):
    with pytest.raises(AnswersError, match=r"heldout\.questions: .*nowhere\.jsonl cannot be read"):
        read_questions(_job(models, str(tmp_path / "nowhere.jsonl")), load_tokenizer(models[1]))
    with pytest.raises(TaskError, match="trivia"):
        read_questions(_job(models, "trivia"), load_tokenizer(models[1]))


def test_prompts_without_a_block_or_without_end_are_refused(models, tmp_path):
    tokenizer = load_tokenizer(models[1])
    long = next(text for text in (f"{number} " * 600 for number in range(100)) if split_of(text) == "heldout")
    with pytest.raises(AnswersError, match=r"at most 1000; choose other heldout\.questions"):
        read_questions(_job(models, _file(tmp_path / "q.jsonl", *_rows([long])), 1), tokenizer)
    job = _job(models, _file(tmp_path / "q.jsonl", *_rows(HELDOUT[:1])), 1)
    engine = job.config.engine.model_copy(update={"tokens_per_block": 512})
    with pytest.raises(AnswersError, match=r"more than one block \(engine\.tokens_per_block 512\)"):
        read_questions(replace(job, config=job.config.model_copy(update={"engine": engine})), tokenizer)


def _asked(models: tuple[Path, Path]) -> list[Asked]:
    """Questions whose right answer is what the consumer says."""
    consumer = load_model(models[1])
    found = []
    for number in range(6):
        ids = [(7 * number + 3 * place) % 90 + 40 for place in range(44)]
        cache = [(k[None], v[None]) for k, v in cache_layers(consumer, trace(consumer, ids[:40], capture={"kv"}))]
        ((*tokens,),) = greedy(consumer, cache, ids[40:], first_position=40, max_tokens=24)
        said = consumer.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        found.append(Asked(tuple(ids[:40]), tuple(ids[40:]), (said,), f"text {number // 2}"))
    return found


def test_nothing_is_lost_over_the_consumers_own_cache_and_much_over_anothers(models):
    asked = _asked(models)
    consumer = load_model(models[1])
    for producer_path, lost in ((models[1], False), (models[0], True)):
        job = _job((producer_path, models[1]), "narrativeqa")
        raw = assemble(job, (RawLayer(),) * 3)
        answered: list[int] = []
        bench = QuestionBench(
            load_model(producer_path), consumer, asked, seed=0, on_answered=partial(answered.append, 1)
        )
        loss = bench.loss(raw)
        assert (loss.num_questions, loss.num_documents, len(answered)) == (6, 3, 12)
        assert loss.oracle_f1 == 1.0
        assert loss.low <= loss.mean <= loss.high
        assert loss.mean == pytest.approx(1 - loss.f1)
        assert (loss.mean > 0.2) == lost
        if not lost:
            assert (loss.mean, loss.high) == (0.0, 0.0)
        assert bench.loss(raw) == loss


def test_a_consumer_that_answers_nothing_has_nothing_to_lose(models):
    asked = [replace(question, answers=("xylophone",)) for question in _asked(models)]
    with pytest.raises(AnswersError, match=r"6 held-out questions score F1 0, .* or state max_kl"):
        QuestionBench(load_model(models[0]), load_model(models[1]), asked, seed=0)


def test_patch_layers_get_the_attention_inputs(models):
    from tiny_translators import random_affine

    from scd_trt.translator import PatchLayer

    job = _job(models, "narrativeqa")
    patch = PatchLayer(random_affine(64, 6, 0), random_affine(6, 64, 1))
    translator = assemble(job, (RawLayer(), patch, RawLayer()))
    asked = _asked(models)
    with pytest.raises(translators.TranslatorError, match="no attention input"):
        QuestionBench(load_model(models[0]), load_model(models[1]), asked, seed=0).loss(translator)
    bench = QuestionBench(load_model(models[0]), load_model(models[1]), asked, seed=0, with_inputs=True)
    assert bench.loss(translator).num_questions == 6
