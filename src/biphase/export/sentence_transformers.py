"""A model folder that looks both ways → one of sentence-transformers too: mean pooling over the tokens of a text."""

from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from biphase.encoder.packed import position_limit
from biphase.files import write_json

CONFIG_FILES: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ],
    "config_sentence_transformers.json": {
        "model_type": "SentenceTransformer",
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    },
}
"""Its fixed files, in the spelling of version 2, which later ones read too."""


def close_texts(tokenizer: Any) -> None:
    """Make a tokenizer end each text with the end-of-text token, as training and evaluation do.

    One that opens texts with a classification token closes them itself.
    """
    from tokenizers.processors import TemplateProcessing

    if tokenizer.cls_token_id is None or tokenizer.sep_token_id is None:
        eos = {"id": "EOS", "ids": [tokenizer.eos_token_id], "tokens": [tokenizer.eos_token]}
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A EOS", pair="$A EOS $B EOS", special_tokens=[eos]
        )


def write_sentence_transformer(folder: Path, network: PreTrainedModel) -> None:
    """The files that make a model folder one of sentence-transformers: the network, then the mean over its tokens."""
    for name, content in CONFIG_FILES.items():
        write_json(folder / name, content)
    limit = position_limit(network)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": limit, "do_lower_case": False})
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": network.config.hidden_size, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling" / "config.json", pooling)
