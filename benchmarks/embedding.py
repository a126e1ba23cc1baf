"""How fast do pairs of texts train an embedding model, packed by biphase and padded by sentence-transformers?

Both arms are sentence-transformers' own trainer, loss, pooling and optimizer on one network from the same weights, and
the same pairs in the same order; they differ in the input module alone. Each arm runs in a process of its own, the arms
take turns, and the losses of every step are compared.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import (
    BUNDLED_TEXT,
    Found,
    describe_setup,
    error_of,
    make_document,
    result_path,
    run_job,
    save,
    summarize_ratios,
    take_turns,
    whole_pairs,
)

ARMS = ("sentence-transformers", "biphase")


@dataclass(frozen=True)
class PairsJob:
    """One arm of one round. Plain values, so that it travels as JSON."""

    arm: str
    model: str
    pairs: str
    loss: str
    batch_size: int
    steps: int
    warmup: int
    seed: int
    max_length: int
    bf16: bool


def write_pairs(path: Path, num: int, longest: int) -> dict[str, float]:
    """Pairs of unequal lengths from the bundled text: questions of 4 to 24 words, passages of 8 to `longest`, drawn
    evenly over the logarithm, as collections of real passages are. Returns what lengths came out, in words."""
    from biphase.corpus.text import find_text_sources, sample_texts

    draw = random.Random(0)
    words = [text.split() for text in sample_texts(find_text_sources([str(BUNDLED_TEXT)]))]
    words = [text for text in words if len(text) > 300]
    rows, lengths = [], []
    for number in range(num):
        text = words[number % len(words)]
        length = round(8 * (longest / 8) ** draw.random())
        begin = draw.randrange(max(1, len(text) - length))
        first = draw.randrange(len(text) - 24)
        anchor = text[first : first + draw.randint(4, 24)]
        rows.append({"anchor": " ".join(anchor), "positive": " ".join(text[begin : begin + length])})
        lengths.append(length)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"median_words": statistics.median(lengths), "longest_words": max(lengths)}


def make_model(preset: str, vocab_size: int, folder: Path, changes: Mapping[str, int] | None = None) -> Path:
    """A network of a preset, its sizes changed or not, with random weights and a tokenizer of the bundled text, as a
    model folder."""
    from biphase.corpus.text import find_text_sources, sample_texts
    from biphase.corpus.tokenizer import train_tokenizer
    from biphase.encoder.network import TokenIds
    from biphase.encoder.network import make_model as make_network
    from biphase.exporting.model import close_texts

    tokenizer: Any = train_tokenizer(sample_texts(find_text_sources([str(BUNDLED_TEXT)])), vocab_size)
    special = (tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    ids = TokenIds(len(tokenizer), *special, bos_token_id=None)
    network: Any = make_network(preset, dict(changes or {}), ids, max_len=2048, seed=0)
    network.base_model.save_pretrained(folder / "encoder")
    close_texts(tokenizer)
    tokenizer.save_pretrained(folder / "encoder")
    return folder / "encoder"


# One arm, in a process of its own


def work(job: PairsJob) -> Found:
    """Pairs a second after the warm-up, and the loss of each step."""
    from biphase.machine import keep_heap

    keep_heap()  # on both sides: what is compared is the module
    import datasets
    import torch
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer import losses
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """The time by the clock and of the processor at the end of each step."""

        def __init__(self) -> None:
            self.ends: list[tuple[float, float]] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append((time.perf_counter(), time.process_time()))

    datasets.disable_progress_bars()
    model = make_arm(job)
    rows = [json.loads(line) for line in Path(job.pairs).read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=folder,
            max_steps=job.warmup + job.steps,
            per_device_train_batch_size=job.batch_size,
            learning_rate=1e-4,
            bf16=job.bf16,
            use_cpu=not torch.cuda.is_available(),
            seed=job.seed,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        clock = Clock()
        loss = getattr(losses, job.loss)(model)
        trainer = SentenceTransformerTrainer(
            model, arguments, train_dataset=datasets.Dataset.from_list(rows), loss=loss, callbacks=[clock]
        )
        trainer.train()
    wall, cpu = (clock.ends[-1][at] - clock.ends[job.warmup - 1][at] for at in (0, 1))
    num = job.steps * job.batch_size
    told = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {"pairs_per_second": num / wall, "pairs_per_cpu_second": num / cpu, "losses": told}


def make_arm(job: PairsJob) -> Any:
    import torch

    if job.arm == "biphase":
        from biphase.embedding.model import make_embedder

        return make_embedder(job.model, job.max_length, "mean")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Normalize, Transformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    module = Transformer(job.model, model_kwargs={"dtype": torch.float32})
    module.max_seq_length = job.max_length
    pooling = Pooling(module.model.config.hidden_size, pooling_mode="mean")
    return SentenceTransformer(modules=[module, pooling, Normalize()])


# All arms, in turns


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    model = make_model(options.preset, options.vocab, folder)
    words = write_pairs(folder / "pairs.jsonl", 4096, options.longest)

    def once(arm: str, number: int) -> Found:
        job = PairsJob(
            arm,
            str(model),
            str(folder / "pairs.jsonl"),
            options.loss,
            options.batch_size,
            options.steps,
            options.warmup,
            number,
            options.max_length,
            options.bf16,
        )
        try:
            return run_job(__file__, job, options.threads, {})
        except subprocess.CalledProcessError as failed:
            return error_of(failed)

    rounds = take_turns(ARMS, options.rounds, once, lambda found: f"{found['pairs_per_second']:,.1f} pairs/s")
    pairs = whole_pairs(rounds, "biphase", "sentence-transformers")
    if not pairs:
        raise SystemExit("no round has both arms: nothing to compare; the errors stand above")
    ratios = [ours["pairs_per_second"] / theirs["pairs_per_second"] for ours, theirs in pairs]
    by_cpu = [ours["pairs_per_cpu_second"] / theirs["pairs_per_cpu_second"] for ours, theirs in pairs]
    first = [abs(ours["losses"][0] - theirs["losses"][0]) for ours, theirs in pairs]
    gaps = [max(map(abs, map(float.__sub__, ours["losses"], theirs["losses"]))) for ours, theirs in pairs]
    return {
        "words": words,
        "rounds": rounds,
        "ratio": summarize_ratios(ratios, by_cpu),
        "difference_of_losses": {"first_step": max(first), "any_step": max(gaps)},
    }


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--preset", default="3m")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--loss", default="MultipleNegativesRankingLoss", help="a class of sentence-transformers")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--longest", type=int, default=200, help="words of the longest passage")
    parser.add_argument("--max-length", type=int, default=512)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    if options.job:
        options.answer.write_text(json.dumps(work(PairsJob(**json.loads(options.job)))))
        return
    started = time.perf_counter()
    machine = describe_setup(options.device, options.threads)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options, Path(folder))
    out = options.out or result_path("embedding", machine["processor"], options.threads)
    shown = {key: value for key, value in vars(options).items() if key not in ("out", "job", "answer")}
    what = "training of embeddings, pairs per second, packed and padded"
    save(out, make_document(what, machine, shown, time.perf_counter() - started) | {"result": result})
    ratio, gap = result["ratio"], result["difference_of_losses"]
    print(f"biphase / sentence-transformers: {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})")
    print(f"losses differ by {gap['first_step']:.1e} in the first step, {gap['any_step']:.1e} in any")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
