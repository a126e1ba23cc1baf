"""A fine-tuned network → a folder of the transformers class that users expect; its `pipeline` predicts as ours does.

Sequence and token classification become the AutoModel class of their kind, retrieval a SentenceTransformer.
"""

import copy
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from biphase.export.card import harmless, render_card, tell_direction
from biphase.export.model import close_texts, set_direction, write_sentence_transformer
from biphase.files import whole_folder, write_json, write_mark, write_text
from biphase.finetuning.encoding import CellContext, EncodedSplit
from biphase.finetuning.families.question_answering import QuestionSplit
from biphase.finetuning.heads import Encoder
from biphase.finetuning.kept import RECORD, KeptRecord
from biphase.finetuning.scores import Score
from biphase.run import find_model

PIPELINE_TAGS = {"sequence_classification": "text-classification", "retrieval": "sentence-similarity"}
"""What the hub calls the models of a family, where that is not its own name; rankers of pairs are `text-ranking`."""


def keep_network(
    model: Any, encoder: Encoder, cell: CellContext, folder: Path, score: Score, test: EncodedSplit
) -> None:
    """Write a trained network, as `to_transformers` gives it, as a model folder with its labels, tokenizer and card,
    whole or not at all; what is there is replaced."""
    card = card_text(cell, encoder, model, score)
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
        write_text(part / "README.md", card)
        write_mark(part, "fine-tuned model")


def card_text(cell: CellContext, encoder: Encoder, model: Any, score: Score) -> str:
    """Write a small model card, with the fields that the hub reads. A model and data of this machine have no name
    there."""
    task, kind, base, headline = cell.task, type(model).__name__, encoder.name.partition("@")[0], score.headline()
    is_of_this_machine = Path(find_model(encoder.name)).exists() or Path(base).exists()
    name = harmless(Path(encoder.name).name if is_of_this_machine else encoder.name)
    pipeline_tag = PIPELINE_TAGS.get(task.family, task.family.replace("_", "-"))
    library, load = "transformers", f"{kind}.from_pretrained(folder)"
    if task.family == "retrieval":
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
        headline=headline.replace(encoder.name, name),
        load=load,
        is_embedder=cell.is_embedder,
        direction=tell_direction(model.config),
        harmless=harmless,
    )
