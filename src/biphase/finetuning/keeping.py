"""A trained cell → one of transformers' own classes, in a model folder that predicts as the cell did."""

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from biphase.console import err
from biphase.corpus.text import WORD
from biphase.corpus.tokenizer import SPLIT_TEXTS, misreading_class
from biphase.encoder.lora import merge_adapters
from biphase.encoder.models import Encoder
from biphase.encoder.network import refuse_equal_lengths, without_padding
from biphase.encoder.proofs import agree, telling_tokens
from biphase.errors import InputError, memory_told
from biphase.exporting.model import as_llama, set_direction
from biphase.files import claimed, mark_successor, read_json_as, refuse_filled, whole_folder, write_json, write_text
from biphase.finetuning import heads
from biphase.finetuning.calibration import AS_THEY_ARE, tell_calibration
from biphase.finetuning.class_report import report_classes, tell_coverage
from biphase.finetuning.config import CellPlan, FinetuneConfig
from biphase.finetuning.encoding import Batch, CellContext, EncodedSplit, TokenizedTexts, pack
from biphase.finetuning.fit import FittedCell, choose_examples, claim_cells, run_cells, write_cells
from biphase.finetuning.kept import RECORD, TRAINED_ROWS, KeptModel, hash_inputs, input_columns, trained_before
from biphase.finetuning.scores import Score, read_score
from biphase.run import find_model
from biphase.tasks.examples import inputs_of, load_examples
from biphase.tasks.spec import Task


class OtherHeadError(InputError):
    """A class of transformers whose head is not the paper's."""


def plan_to_keep(plan: CellPlan) -> CellPlan:
    """Plan to train a head that can be kept: the paper's if the network's class in transformers has it; otherwise the
    head of that class, unless `head` was given, and print this choice. Raises `InputError` as `check_keepable` does."""
    encoder = heads.open_encoder(plan.model)
    try:
        check_keepable(encoder, plan.task, plan.config)
    except OtherHeadError as error:
        if "head" in plan.config.model_fields_set:
            raise
        plan = plan.changed(head="transformers")
        check_keepable(encoder, plan.task, plan.config)
        err.print(f"{error}, as it does here; `evaluate` trains the paper's")
    return plan


@torch.no_grad()
def check_keepable(encoder: Encoder, task: Task, finetuning: FinetuneConfig) -> None:
    """Raise `InputError` for a network that has another head in transformers (`OtherHeadError`), or whose outputs for a
    text change in a batch, and for templates that cannot become prompts."""
    cell = CellContext(task, finetuning, torch.device("cpu"), torch.float32)
    if task.kind.is_answering and finetuning.qa_head != "span":
        raise InputError("keep: transformers has no class with the token head; give qa_head=span")
    if cell.is_embedder:
        refuse_equal_lengths(encoder.backbone, encoder.name)
    for template in (task.query_template, task.document_template) if cell.is_embedder else ():
        if not template.endswith("{text}"):
            raise InputError(f"keep: a prompt comes before its text; '{template}' must end with {{text}}")
    config: Any = encoder.backbone.config
    if misread_as := misreading_class(encoder.tokenizer.pretrained, config):
        taken = f"transformers would take {misread_as} for the type '{config.model_type}'"
        raise InputError(f"keep: {taken}, which splits texts differently than the tokenizer.json of {encoder.name}")
    with torch.random.fork_rng(devices=[]):
        model = to_transformers(heads.build_network(encoder, cell, []), encoder, cell)
    if cell.is_embedder:
        return
    both = proof_batch(model, cell, (0, 1))
    kind = type(model).__name__
    logits = heads.padded_logits(model, both)
    if finetuning.head == "transformers":
        alone = [heads.padded_logits(model, proof_batch(model, cell, (sample,))) for sample in (0, 1)]
        if not agree(logits, torch.cat(alone)):
            raise InputError(f"keep: {kind} gives something else for a text in a batch than alone; leave keep out")
    if task.kind.head == "ForSequenceClassification":
        halved = heads.padded_logits(divide_logits(model, 2), both)
        if not agree(2 * halved, logits):
            raise InputError(f"keep: the logits of {kind} are not those of its last layer; leave keep out")


def proof_batch(model: Any, cell: CellContext, samples: Sequence[int]) -> Batch:
    """Pack one or both of two samples, of 12 and 7 tokens, on the CPU."""
    tokens_T = telling_tokens(model.base_model, 19).numpy()
    texts = TokenizedTexts(tokens_T, np.array([0, 12, 19]), np.array([], dtype=np.int64))
    return pack(texts, np.array(samples), replace(cell, device=torch.device("cpu"), dtype=torch.float32))


@memory_told("lower microbatch_tokens (65,536 unless given)")
def fit_and_keep(plan: CellPlan, out: Path, folder: Path) -> Score:
    """Fine-tune a model for one cell, as `fit_cells` does, and keep the network in `folder`; `check_keepable` must have
    accepted the cell. A finished cell trains again, and its score stays as it is; prints the
    score of the new training if that is another. A training that diverged leaves no folder. Raises `BusyError` if
    another process works on the cell."""
    with claim_cells([plan], out):
        [fitted] = write_cells([plan], out) or run_cells([plan])
        score = read_score(plan.folder(out))
        if not fitted.score.diverged:
            keep_cell(fitted, folder)
            if fitted.score.metrics != score.metrics:
                told = (
                    f"the kept model has {fitted.score.outcome}; the cell, which was finished before, {score.outcome}"
                )
                err.print(f"{plan.task.name}: trained again, with another score: {told}")
    return score


def keep_anew(plan: CellPlan, out: Path, folder: Path) -> Score:
    """Do as `fit_and_keep` does, in a folder that has no files yet. Raises `InputError` for one that has some, and
    `BusyError` if another process writes into it."""
    with claimed(folder.resolve(), "keep.part"):
        refuse_filled(folder)  # another process may have written it meanwhile
        return fit_and_keep(plan, out, folder)


def keep_cell(fitted: FittedCell, folder: Path) -> None:
    """Write a trained network, calibrated, to a model folder."""
    cell = replace(fitted.context, calibration=fitted.score.calibration or AS_THEY_ARE)
    told = tell_calibration(cell.calibration, cell.task.kind.metrics[cell.task.metric].words)
    for line in filter(None, (told, tell_kept_coverage(fitted, cell))):
        err.print(line)
    model = to_transformers(fitted.network, fitted.encoder, cell)
    heads.refuse_replaced(fitted.plan.model)
    inputs = list_trained(fitted.plan, fitted.train)
    keep_network(model, fitted.encoder, cell, folder, fitted.score, fitted.splits["test"], inputs)


def tell_kept_coverage(fitted: FittedCell, cell: CellContext) -> str:
    """Write how accurate the calibrated network is on the surest test examples; "" if it has no such probabilities."""
    if fitted.score.calibration is None or cell.calibration.thresholds:
        return ""
    _, rows = fitted.splits["test"].judge(fitted.outputs["test"] / cell.calibration.temperature, cell)
    coverage = report_classes(rows, cell.task.classes).coverage
    return f"the kept model on test: {tell_coverage(coverage)}" if coverage else ""


def list_trained(plan: CellPlan, train: EncodedSplit) -> list[Any]:
    """List the inputs of the examples that train a cell's network or validate it; none in retrieval."""
    if plan.task.kind.is_search:
        return []
    data = load_examples(plan.evaluation, bool(plan.config.judged_only), plan.config.max_eval_examples)
    inputs = inputs_of(data, "train")
    return [*(inputs[index] for index in choose_examples(train, plan.config)), *inputs_of(data, "validation")]


@torch.no_grad()
def to_transformers(network: Any, encoder: Encoder, cell: CellContext) -> Any:
    """Turn a network into one of transformers for any text, on the CPU. Raises `OtherHeadError` if the class of its
    type has another head."""
    network = network.float().cpu().eval()
    merge_adapters(network)
    pretrained: Any = encoder.backbone
    # Back to the encoder itself, or to the whole embedding, whose unused rows have not changed.
    if isinstance(network.backbone, heads.FrozenFeatures):
        network.backbone = heads.copy_backbone(pretrained, [])
    inner = without_padding(network.backbone)
    used = inner.get_input_embeddings()
    if isinstance(used, heads.UsedEmbedding):
        whole = copy.deepcopy(pretrained.get_input_embeddings()).to(used.weight.dtype)
        is_used_V = used.row_of_V < used.num_embeddings
        whole.weight[is_used_V] = used.weight[used.row_of_V[is_used_V]].to(whole.weight.device)
        inner.set_input_embeddings(whole)
    if cell.is_embedder:
        return inner
    units = [layer.take_unit() for layer in network.modules() if isinstance(layer, heads.NumberLayer)]
    model = network.model if isinstance(network, heads.ClassNetwork) else with_same_head(network, encoder, cell)
    for mean, scale in units:
        divide_logits(model, 1 / scale, mean)
    return divide_logits(model, cell.calibration.temperature)


@torch.no_grad()
def divide_logits(model: Any, temperature: float, mean: float = 0.0) -> Any:
    """Divide the logits of a class of transformers by a temperature and add a mean, in the weights of its last
    layer."""
    if temperature != 1 or mean:
        layer = model.get_submodule(heads.last_layer(model))
        for weight in layer.parameters():
            weight.div_(temperature)
        if mean:
            layer.bias.add_(mean)
    return model


@torch.no_grad()
def with_same_head(network: Any, encoder: Encoder, cell: CellContext) -> Any:
    """Make the class of transformers for a network with the paper's head, with its weights. Raises `OtherHeadError` if
    that class computes something else."""
    inner = without_padding(network.backbone)
    config = heads.config_with_head(inner.config, encoder, cell)
    config.classifier_pooling = "mean"  # EuroBERT's and ModernBERT's name for the paper's pooling
    # EuroBERT has no class for answers, but is a Llama that looks both ways.
    if cell.task.kind.is_answering and isinstance(config, transformers.EuroBertConfig):
        config = as_llama(config)
        set_direction(config, causal=False)
    model = heads.make_class(config, network.backbone, cell).eval()
    kind = type(model).__name__
    remedy = "head=transformers trains and scores its own"
    refusal: InputError = OtherHeadError(f"keep: {kind} has another head than the paper's; {remedy}")
    if cell.config.frozen:
        why = f"for {cell.task.family.replace('_', ' ')}: {kind} has more than one layer"
        refusal = InputError(f"keep: a linear probe cannot be kept {why}; leave frozen out")
    model.base_model.load_state_dict(inner.state_dict(), strict=False)
    layers = [layer for layer in model.children() if isinstance(layer, nn.Linear)]
    trained_layers = [layer for layer in network.children() if isinstance(layer, nn.Linear)]
    if [layer.weight.shape for layer in layers] != [layer.weight.shape for layer in trained_layers]:
        raise refusal
    for new, old in zip(layers, trained_layers, strict=True):
        new.load_state_dict(old.state_dict(), strict=False)
    # It must give the same logits for padded samples as ours for packed ones.
    batch = proof_batch(model, cell, (0, 1))
    if not torch.allclose(network(batch), heads.padded_logits(model, batch), rtol=1e-3, atol=1e-4):
        raise refusal
    return model


def keep_network(
    model: Any, encoder: Encoder, cell: CellContext, folder: Path, score: Score, test: Any, inputs: Iterable[Any] = ()
) -> None:
    """Write a trained network (of `to_transformers`) as a model folder with labels, tokenizer and card, whole or not at
    all. The new folder replaces an earlier one (`mark_successor`). `test` is the encoded test split; `inputs` trained
    or validated it."""
    from biphase.exporting.golden import write_golden
    from biphase.exporting.model import close_texts, save_encoder, write_sentence_transformer

    card = card_text(cell, encoder, model, score)
    tokenizer = copy.deepcopy(encoder.tokenizer.pretrained)
    close_texts(tokenizer)
    tokenizer.model_max_length = cell.config.max_length
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(heads.padding_token(encoder))
    if cell.config.ranking == "pairs":  # both texts of a pair had the same type
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    with whole_folder(folder) as part:
        if cell.is_embedder:
            templates = {"query": cell.task.query_template, "document": cell.task.document_template}
            prompts = {name: template.removesuffix("{text}") for name, template in templates.items()}
            write_sentence_transformer(part, model, cell.config.max_length, prompts=prompts)
        save_encoder(part, model, tokenizer)
        spell_special_tokens(part)
        task, calibration = cell.task, cell.calibration
        record = KeptModel(
            cell=score.cell, task=task, config=cell.config, calibration=calibration, part_of=task.part_of
        )
        if task.kind.is_answering:
            longest = cell.config.max_answer_tokens or test.max_answer_tokens
            config = cell.config.model_copy(update={"max_answer_tokens": longest})
            record = record.model_copy(update={"config": config, "has_unanswerable": test.has_unanswerable})
        inputs = [*inputs]
        if task.kind.is_tagging:
            divides = bool(inputs) and all(WORD.findall(" ".join(words)) == [*words] for words in inputs)
            record = record.model_copy(update={"divides_text": divides})
        write_json(part / RECORD, record.model_dump(mode="json"))
        np.union1d(trained_before(encoder, cell.config), hash_inputs(inputs)).tofile(part / TRAINED_ROWS)
        write_golden(part)
        write_text(part / "README.md", card)
        mark_successor(part, folder, "fine-tuned model")


def spell_special_tokens(folder: Path) -> None:
    """Make every program that opens a folder's tokenizer read the name of a special token in a text, such as `[MASK]`,
    as letters, because fine-tuning did (`HashedTokenizer.tokenize`). Templates still add special tokens, by their ids.

    transformers has a setting for this. Others find in texts the added tokens of `tokenizer.json`; special ones move
    from there to the model's vocabulary. They stay where that would change how texts are read: a Unigram model finds
    its pieces in texts, so only those that it has already can leave the list.
    """
    from tokenizers import Tokenizer

    settings = read_json_as(folder / "tokenizer_config.json", dict[str, Any])
    write_json(folder / "tokenizer_config.json", settings | {"split_special_tokens": True})
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    state = json.loads(tokenizer.to_str())
    vocab, added = state["model"]["vocab"], state["added_tokens"]
    if isinstance(vocab, dict):
        state["model"]["vocab"] = vocab = {entry["content"]: entry["id"] for entry in added} | vocab
    pieces = vocab if isinstance(vocab, dict) else {piece for piece, _ in vocab}
    state["added_tokens"] = [entry for entry in added if not entry["special"] or entry["content"] not in pieces]
    spelled = Tokenizer.from_str(json.dumps(state))
    names = [entry["content"] for entry in added]
    texts = [*SPLIT_TEXTS, *names, *(f"a{name}b {name}." for name in names)]
    readings = []
    for backend in (tokenizer, spelled):
        backend.encode_special_tokens = True
        readings.append([backend.encode(text, add_special_tokens=False).ids for text in texts])
    if readings[0] == readings[1]:
        spelled.save(str(path))


def card_text(cell: CellContext, encoder: Encoder, model: Any, score: Score) -> str:
    """Write a small model card, with the fields that the Hub reads. It does not name a model or data of this machine
    as the Hub's."""
    from huggingface_hub import ModelCardData

    from biphase.exporting.card import harmless, render_card

    task, kind, base = cell.task, type(model).__name__, encoder.name.partition("@")[0]
    is_of_this_machine = Path(find_model(encoder.name)).exists() or Path(base).exists()
    name = harmless(Path(encoder.name).name if is_of_this_machine else encoder.name)
    pipeline_tag = task.kind.pipeline_tag
    library, load = "transformers", f"{kind}.from_pretrained(folder)"
    if task.kind.is_search:
        library, load = "sentence-transformers", f"SentenceTransformer(folder)  # {kind}"
        if not cell.is_embedder:
            pipeline_tag, load = "text-ranking", "CrossEncoder(folder)  # of sentence-transformers"
    hub_id = task.hub.id if task.hub is not None else None
    head = ModelCardData(
        library_name=library,
        pipeline_tag=pipeline_tag,
        base_model=None if is_of_this_machine else base,
        datasets=hub_id if score.source.partition("@")[0] == hub_id else None,
        tags=["biphase", model.config.model_type],
    )
    return render_card(
        Path(__file__).with_name("card.md.j2"),
        head,
        task=task,
        name=name,
        score=score.model_copy(update={"model": name}),
        load=load,
        is_embedder=cell.is_embedder,
        has_columns=len(input_columns(task)) > 1,
        config=model.config,
    )
