"""A fine-tuned network → a folder of the transformers class that users expect; its `pipeline` predicts as ours does.

Sequence and token classification become the AutoModel class of their kind, retrieval a SentenceTransformer. A network
whose head no class of transformers has is refused before it is trained: what is kept computes what was scored.

Letters: T tokens of a sample, V vocabulary, D width.
"""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from huggingface_hub import ModelCardData
from torch import nn

from biphase.corpus.tokenizer import misreading_class
from biphase.encoder.proofs import telling_tokens
from biphase.errors import InputError
from biphase.export.card import harmless, tell_direction
from biphase.export.model import as_llama, close_texts, set_direction, write_sentence_transformer
from biphase.files import whole_folder, write_json, write_mark, write_text
from biphase.finetuning.config import FinetuneConfig
from biphase.finetuning.encoding import CellContext, EncodedSplit, TokenizedTexts, pack
from biphase.finetuning.families.question_answering import QuestionSplit
from biphase.finetuning.heads import Encoder, PaddedNetwork, add_head, copy_backbone, whole_backbone
from biphase.finetuning.kept import RECORD, KeptRecord
from biphase.finetuning.scores import Score
from biphase.run import find_model
from biphase.tasks.spec import Family, Task

AUTO_CLASSES: dict[Family, Any] = {
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "token_classification": transformers.AutoModelForTokenClassification,
    "question_answering": transformers.AutoModelForQuestionAnswering,
    "retrieval": transformers.AutoModelForSequenceClassification,
    "multiple_choice": transformers.AutoModelForSequenceClassification,
}
"""What a family's networks are kept as, where they have a head."""

PIPELINE_TAGS: dict[Family, str] = {
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
    "question_answering": "question-answering",
    "retrieval": "sentence-similarity",
    "multiple_choice": "multiple-choice",
}
"""What the hub calls a family's models; rankers of pairs are `text-ranking`."""

TAGGING = """\
The input is a sentence, words and punctuation apart as in training; each token carries the tag of its word, `B-` too.
So let transformers take words for entities, not tokens: `pipeline("token-classification", folder,
aggregation_strategy="first")`. `biphase predict` takes any text."""


def check_keepable(encoder: Encoder, task: Task, finetuning: FinetuneConfig) -> None:
    """Raises `InputError` for a network that transformers has no class for, and for templates that are no prompts."""
    cell = CellContext(task, finetuning, torch.device("cpu"), torch.float32)
    if task.family == "question_answering" and finetuning.qa_head != "span":
        raise InputError("keep: transformers has no class with the token head; give qa_head=span")
    for template in (task.query_template, task.document_template) if cell.is_embedder else ():
        if not template.endswith("{text}"):
            raise InputError(f"keep: a prompt stands before its text; '{template}' must end with {{text}}")
    config: Any = encoder.backbone.config
    misread_as = misreading_class(encoder.tokenizer.pretrained, config)
    if misread_as:
        raise InputError(
            f"keep: transformers would take {misread_as} for the type '{config.model_type}', which splits texts "
            f"otherwise than the tokenizer.json of {encoder.name}: what is kept would predict something else"
        )
    with torch.random.fork_rng(devices=[]):
        backbone = copy_backbone(encoder.backbone, [])
        to_transformers(add_head(backbone, cell).eval(), encoder, cell)


def keep_network(
    network: Any, encoder: Encoder, cell: CellContext, folder: Path, score: Score, test: EncodedSplit
) -> None:
    """Write a trained network as a model folder with its labels, tokenizer and card, whole or not at all; what is
    there is replaced."""
    network = network.float().cpu().eval()
    model = to_transformers(network, encoder, cell)
    tokenizer = copy.deepcopy(encoder.tokenizer.pretrained)
    close_texts(tokenizer)
    tokenizer.model_max_length = cell.config.max_length
    if cell.config.ranking == "pairs":  # both texts of a pair had the same type
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    if getattr(model.config, "is_causal", True) is False:
        set_direction(model.config, causal=False)
    with whole_folder(folder) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        if cell.is_embedder:
            templates = {"query": cell.task.query_template, "document": cell.task.document_template}
            prompts = {name: template.removesuffix("{text}") for name, template in templates.items()}
            write_sentence_transformer(part, model, cell.config.max_length, prompts=prompts)
        record = KeptRecord(cell=score.cell, task=cell.task, config=cell.config)
        if isinstance(test, QuestionSplit):
            longest = cell.config.max_answer_tokens or test.max_answer_tokens
            config = cell.config.model_copy(update={"max_answer_tokens": longest})
            record = record.model_copy(update={"config": config, "has_unanswerable": test.has_unanswerable})
        write_json(part / RECORD, record.model_dump(mode="json"))
        write_text(part / "README.md", card_text(cell, encoder, model, score))
        write_mark(part, "fine-tuned model")


def to_transformers(network: Any, encoder: Encoder, cell: CellContext) -> Any:
    """The network as transformers has it, on the CPU, with the whole embedding.

    Raises `InputError` where the class of its type has another head.
    """
    network.backbone = whole_backbone(network.backbone, encoder)
    if cell.is_embedder:
        return network.backbone
    config = copy.deepcopy(network.backbone.config)
    # A EuroBERT has no class for answers, but is a Llama that looks both ways.
    if cell.task.family == "question_answering" and isinstance(config, transformers.EuroBertConfig):
        config = as_llama(config)
        set_direction(config, causal=False)
    if cell.task.family != "question_answering":
        config.id2label = {0: cell.task.label} if cell.num_outputs == 1 else dict(enumerate(cell.task.classes))
        config.label2id = {name: number for number, name in config.id2label.items()}
        config.problem_type = cell.task.problem_type
        config.classifier_pooling = "mean"  # EuroBERT's and ModernBERT's name for what our head does
    if cell.task.family == "retrieval":  # else CrossEncoder would give other numbers, in the same order
        config.sentence_transformers = {"activation_fn": "torch.nn.modules.linear.Identity"}
    return with_same_head(config, network, cell)


@torch.no_grad()
def with_same_head(config: Any, network: Any, cell: CellContext) -> Any:
    """The class of transformers for a configuration, with the weights of ours. Raises `InputError` where there is none
    that computes the same."""
    kind = AUTO_CLASSES[cell.task.family]
    is_sequence = kind is transformers.AutoModelForSequenceClassification
    is_probe = cell.config.frozen and is_sequence
    remedy = "a linear probe is not kept" if is_probe else "encoders of biphase's own have one"
    needed = f"'{config.model_type}' with our head for {cell.task.family}"
    refusal = InputError(f"keep: transformers has no class for {needed}; {remedy}")
    has_dense_layer = config.model_type == "modernbert" and not is_sequence
    if has_dense_layer:
        config.classifier_activation = "linear"  # see below
    try:
        model = kind.from_config(config, attn_implementation="sdpa").float().eval()
    except ValueError:
        raise refusal from None
    model.base_model.load_state_dict(network.backbone.state_dict(), strict=False)
    theirs = [layer for name, layer in model.named_children() if isinstance(layer, nn.Linear)]
    ours = [layer for layer in network.children() if isinstance(layer, nn.Linear)]
    if [layer.weight.shape for layer in theirs] != [layer.weight.shape for layer in ours]:
        raise refusal
    for new, old in zip(theirs, ours, strict=True):
        new.load_state_dict(old.state_dict(), strict=False)
    if has_dense_layer:
        # ModernBERT's dense layer and norm below its classifier of tokens shall change nothing: the layer takes the
        # scale of the network's last norm away, which leaves what is normed already, and the norm brings it back.
        scale_D = model.base_model.final_norm.weight
        model.head.dense.weight.copy_(torch.diag(1 / scale_D))
        model.head.norm.weight.copy_(scale_D)
    # On padded samples of 12 and 5 tokens it must give the logits that ours gives on them packed.
    tokens_T = telling_tokens(model.base_model, 17).numpy()
    texts = TokenizedTexts(tokens_T, np.array([0, 12, 17]), np.array([], dtype=np.int64))
    batch = pack(texts, np.arange(2), replace(cell, device=torch.device("cpu"), dtype=torch.float32))
    if not torch.allclose(network(batch), PaddedNetwork(model)(batch), rtol=1e-3, atol=1e-4):
        raise refusal
    return model


def card_text(cell: CellContext, encoder: Encoder, model: Any, score: Score) -> str:
    """A small model card, with the fields that the hub reads. A model and data of this machine have no name there."""
    task, kind, base = cell.task, type(model).__name__, encoder.name.partition("@")[0]
    is_of_this_machine = Path(find_model(encoder.name)).exists() or Path(base).exists()
    name = harmless(Path(encoder.name).name if is_of_this_machine else encoder.name)
    template, query, document = map(harmless, (task.template, task.query_template, task.document_template))
    library, pipeline_tag, load = "transformers", PIPELINE_TAGS[task.family], f"{kind}.from_pretrained(folder)"
    inputs = {
        "sequence_classification": f"The input is {template}, columns filled in.",
        "token_classification": TAGGING,
        "question_answering": f"The input is {template} as one text; `biphase predict` makes it of rows.",
        "multiple_choice": f"Each choice is an input {template}; the highest score is the answer.",
        "retrieval": f"Queries are given as {query}, documents as {document}.",
    }[task.family]
    if task.family == "retrieval":
        library, load = "sentence-transformers", f"SentenceTransformer(folder)  # {kind}"
        if not cell.is_embedder:
            pipeline_tag, load = "text-ranking", "CrossEncoder(folder)  # of sentence-transformers"
            inputs = "The input is a query and a document, as a pair."
    licence = f"Licence of the data: {harmless(task.licence)}.\n" if task.licence else ""
    headline = score.headline().replace(encoder.name, name)
    hub_id = task.hub.id if task.hub is not None else None
    dataset = hub_id if score.source.partition("@")[0] == hub_id else None
    tags = ["biphase", model.config.model_type]
    hub_base = None if is_of_this_machine else base
    head = ModelCardData(
        library_name=library, pipeline_tag=pipeline_tag, base_model=hub_base, datasets=dataset, tags=tags
    )
    return (
        f"---\n{head}\n---\n\n# {task.name}\n\n{name} fine-tuned by biphase.\n\n{headline}\n\n    {load}\n\n"
        f"{inputs}\n{tell_direction(model.config)}{licence}"
    )
