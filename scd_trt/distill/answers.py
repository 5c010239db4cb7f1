"""Held-out questions, answered by the consumer over what a translator makes of the producer's cache (METHOD, section 3).

Owns: which questions are asked, the prompts as they are served, and the *relative F1 loss* of a translator: the share of
the F1 that the consumer reaches with its own cache which is lost, over the same questions. As when serving, the prompt's
full blocks before its last token are replaced, and the consumer computes the rest itself; answers are greedy. A prompt
without a full block would be answered from the consumer's own cache and hide a loss: it is refused.

Questions come from the `heldout` split: those of `evaluate.tasks`, or a .jsonl file with `passage`, `question` and `answer`
(text, or a list of accepted answers) in each line.

F1 of a few dozen questions is noisy, and both answers to one question share what makes it hard. The interval is therefore
paired, and draws whole documents (`evaluate.metrics.relative_loss`). Both models run in their serving dtypes.

Memory: the producer's rows and the consumer's own answers; prompts with equal blocks share theirs.
Errors: `AnswersError` where questions cannot be asked, or where the consumer answers none itself.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scd_trt.codec import Decoder, Encoder, LayerInput, through_codes
from scd_trt.config import ScdError
from scd_trt.corpus import split_of, text_digest
from scd_trt.distill.plan import Job
from scd_trt.evaluate.generation import greedy
from scd_trt.evaluate.metrics import Interval, relative_loss
from scd_trt.evaluate.tasks import Question, f1, prompt, questions
from scd_trt.kv_cache import num_sent_blocks
from scd_trt.models import Capture, LoadedModel, cache_layers, trace
from scd_trt.translator import Translator

MAX_ANSWER_TOKENS = 24
MAX_FILE_BYTES = 256 << 20

KvLayer = tuple[Tensor, Tensor]


class AnswersError(ScdError):
    """Held-out questions cannot be read, asked, or answered."""


@dataclass(frozen=True)
class Asked:
    """A question as tokens: the blocks that are replaced, what follows them, and what is right."""

    prefix_ids: tuple[int, ...]
    tail_ids: tuple[int, ...]
    answers: tuple[str, ...]
    document: str


@dataclass(frozen=True)
class F1Loss:
    """What a translator loses on the questions; shares of the consumer's own F1, negative where it gains."""

    mean: float
    low: float
    high: float
    f1: float
    oracle_f1: float
    num_questions: int
    num_documents: int

    def as_json(self) -> dict[str, Any]:
        """Fields by name."""
        return asdict(self)


def read_questions(job: Job, tokenizer: Any) -> tuple[Asked, ...]:
    """The held-out questions of a pair, a seeded sample.

    Raises:
        AnswersError: too few, or prompts that do not fit the pair.
        TaskError: an unknown task.
    """
    heldout, seed = job.config.heldout, job.config.method.seed
    if heldout.questions.endswith(".jsonl"):
        found = _sample(_file_questions(Path(heldout.questions)), heldout.questions, heldout.num_questions, seed)
    else:
        found = questions(heldout.questions, split="heldout", limit=heldout.num_questions, seed=seed)
    limit = min(job.producer.max_position, job.consumer.max_position) - MAX_ANSWER_TOKENS
    return tuple(_asked(question, tokenizer, job.config.engine.tokens_per_block, limit) for question in found)


def _file_questions(path: Path) -> Iterator[Question]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise AnswersError(f"{path}: {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are read")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AnswersError(f"heldout.questions: {path} cannot be read ({error})") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _question(line, f"{path}:{number}")


def _question(line: str, place: str) -> Question:
    try:
        row = json.loads(line)
        passage, question, answer = row["passage"], row["question"], row["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise AnswersError(f"{place}: expected an object with passage, question and answer ({error!r})") from error
    answers = answer if isinstance(answer, list) else [answer]
    if not answers or not all(isinstance(text, str) for text in (passage, question, *answers)):
        raise AnswersError(f"{place}: passage, question and answers must be text, with at least one answer")
    return Question(passage.strip(), " ".join(question.split()), tuple(answers), text_digest(passage))


def _sample(found: Iterator[Question], source: str, number: int, seed: int) -> list[Question]:
    heldout = [question for question in found if split_of(question.context) == "heldout"]
    if len(heldout) < number:
        raise AnswersError(
            f"{source}: the heldout split holds {len(heldout)} questions, heldout.num_questions asks for {number}; "
            "a tenth of all passages belongs to it"
        )
    random.Random(seed).shuffle(heldout)
    return heldout[:number]


def _asked(question: Question, tokenizer: Any, tokens_per_block: int, limit: int) -> Asked:
    rendered = tokenizer.apply_chat_template(
        list(prompt(question).messages), add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer(rendered, add_special_tokens=False, verbose=False)["input_ids"]
    num_prefix = num_sent_blocks(len(ids), tokens_per_block) * tokens_per_block
    if not num_prefix or len(ids) > limit:
        raise AnswersError(
            f"the prompt of {question.question!r} has {len(ids)} tokens; it must have more than one block "
            f"(engine.tokens_per_block {tokens_per_block}) and at most {limit}; choose other heldout.questions"
        )
    return Asked(tuple(ids[:num_prefix]), tuple(ids[num_prefix:]), question.answers, question.digest)


class QuestionBench:
    """Both models' answers to the same questions."""

    def __init__(
        self,
        producer: LoadedModel,
        consumer: LoadedModel,
        asked: Sequence[Asked],
        *,
        seed: int,
        with_inputs: bool = False,
        on_answered: Callable[[], None] = lambda: None,
    ) -> None:
        """Run the producer over every prompt, and let the consumer answer from its own cache.

        Args:
            with_inputs: keep the producer's attention inputs too, for Patch layers.
            on_answered: is told of every question that was answered.
        Raises:
            AnswersError: the consumer's own answers have no word in common with the expected ones.
        """
        self._consumer = consumer
        self._asked = asked
        self._seed = seed
        self._on_answered = on_answered
        self._inputs = _producer_rows(producer, asked, with_inputs)
        self._oracle_f1 = [self._f1(question, self._own_cache(question)) for question in asked]
        if not sum(self._oracle_f1):
            raise AnswersError(
                f"the consumer's own answers to {len(asked)} held-out questions score F1 0, so no share of it can be lost; "
                "choose other heldout.questions, or state max_kl"
            )

    @torch.no_grad()
    def loss(self, translator: Translator) -> F1Loss:
        """Relative F1 loss of a translator, with its paired 95 % interval over documents."""
        encoder, decoder = Encoder(translator), Decoder(translator)
        scores = [
            self._f1(question, _decoded(encoder, decoder, self._inputs[question.prefix_ids]))
            for question in self._asked
        ]
        documents = [question.document for question in self._asked]
        found: Interval = relative_loss(scores, self._oracle_f1, seed=self._seed, clusters=documents)
        return F1Loss(
            mean=found.mean,
            low=found.low,
            high=found.high,
            f1=sum(scores) / len(scores),
            oracle_f1=sum(self._oracle_f1) / len(scores),
            num_questions=len(scores),
            num_documents=len(set(documents)),
        )

    def _own_cache(self, question: Asked) -> list[KvLayer]:
        return cache_layers(self._consumer, trace(self._consumer, question.prefix_ids, capture={"kv"}))

    def _f1(self, question: Asked, cache: Sequence[KvLayer]) -> float:
        dtype = self._consumer.dtype
        (tokens,) = greedy(
            self._consumer,
            [(k[None].to(dtype), v[None].to(dtype)) for k, v in cache],
            question.tail_ids,
            first_position=len(question.prefix_ids),
            max_tokens=MAX_ANSWER_TOKENS,
        )
        self._on_answered()
        text = self._consumer.tokenizer.decode(tokens, skip_special_tokens=True).strip()
        return f1(text, question.answers)


def _producer_rows(
    producer: LoadedModel, asked: Sequence[Asked], with_inputs: bool
) -> dict[tuple[int, ...], list[LayerInput]]:
    capture: set[Capture] = {"kv", "x"} if with_inputs else {"kv"}
    rows = {}
    for ids in dict.fromkeys(question.prefix_ids for question in asked):
        traced = trace(producer, ids, capture=capture)
        inputs = traced.x_TM or (None,) * producer.spec.num_layers
        rows[ids] = [LayerInput(k, v, x) for (k, v), x in zip(cache_layers(producer, traced), inputs, strict=True)]
    return rows


def _decoded(encoder: Encoder, decoder: Decoder, inputs: Sequence[LayerInput]) -> list[KvLayer]:
    groups = range(len(encoder.groups))
    return [layer for group in groups for layer in through_codes(encoder, decoder, group, inputs)]
