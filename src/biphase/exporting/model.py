"""A checkpoint → a folder that transformers loads: weights, a configuration with the direction, tokenizer, card.

The folder of a bidirectional network also suits sentence-transformers, with mean pooling over the tokens of a text.

EuroBERT has no causal class, but a EuroBERT is a Llama without the causal mask, weight for weight. So a run with a
causal last objective becomes a Llama, any other a EuroBERT. An adapted decoder keeps its class; `is_causal: false` in
its configuration makes it bidirectional in transformers.
"""

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, EuroBertConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from biphase.corpus.tokenizer import load_tokenizer, misreading_class
from biphase.encoder import proofs
from biphase.encoder.attention import lay_out
from biphase.encoder.network import language_model_class, layer_cosines, load_model, merge_weights, save_network
from biphase.encoder.packed import LanguageModelHead, packed_hidden
from biphase.encoder.proofs import FailedProofError
from biphase.errors import InputError
from biphase.exporting.card import FLOOR, MISREAD, describe_export, draw_curves
from biphase.exporting.golden import write_golden
from biphase.exporting.plain import takes_mean
from biphase.files import mark_successor, read_json, read_json_as, refuse_filled, whole_folder, write_json, write_text
from biphase.hub import fetch_model, model_fingerprint, output_width, position_limit, read_config
from biphase.recipe import Recipe
from biphase.run import CheckpointManifest, Run, find_checkpoint, read_checkpoint_manifest, read_recipe


def merge_with_parent(network: PreTrainedModel, run: Run, manifest: CheckpointManifest, share: float) -> str:
    """Average the network, in place, with the decoder that it came from, whose weight is `share`; return a line.

    The decoder is the one that training began with, with new rows for tokens that it lacked, such as the mask token.

    Raises:
        InputError: for a causal run, a run from random weights, or a parent that is missing or has changed.
    """
    if not 0 < share < 1:
        raise InputError(f"merge {share:g} is not a share of the parent: give one above 0 and below 1, such as 0.5")
    if manifest.is_causal:
        raise InputError(f"{run.path} looks back only: merge is for an encoder that came from a decoder")
    name, folder, recipe = find_decoder(run, manifest)
    embedding: Any = network.get_input_embeddings()
    vocab_size, new_head = embedding.weight.shape[0], recipe.init.new_head
    parent = load_model(folder, vocab_size=vocab_size, seed=recipe.seed, new_head=new_head)
    cosines = ", ".join(f"{layer} {cosine:.4f}" for layer, cosine in layer_cosines(network, parent, name).items())
    merge_weights(network, parent, share)
    return f"{share:.0%} of it is {name}; cosine between the weights of the two, by layer: {cosines}"


def find_decoder(run: Run, manifest: CheckpointManifest) -> tuple[str, Path, Recipe]:
    """Find the nearest causal ancestor, or the foreign model at the beginning; return its name, its model folder and
    the recipe of the run that started from it."""
    recipe = read_recipe(run)
    init = recipe.init
    if init.model is not None:
        folder = fetch_model(init.model, init.revision)
        if model_fingerprint(init.model, folder) != manifest.parent:
            raise InputError(f"{init.model} is not what {run.path} started from: its files have changed since")
        return Path(init.model).name if Path(init.model).is_dir() else init.model, folder, recipe
    if init.checkpoint is None:
        raise InputError(f"{run.path} began with random weights, not with a decoder to merge with; leave out merge")
    folder = find_checkpoint(init.checkpoint)
    parent = read_checkpoint_manifest(folder)
    if parent.content != manifest.parent:
        raise InputError(f"{init.checkpoint} is not what {run.path} started from: it has been trained again since")
    parent_run = Run(folder.parent.parent)
    if not parent.is_causal:
        return find_decoder(parent_run, parent)
    return f"{parent_run.path.name}@{parent.step}", folder / "model", recipe


DIRECTION_KEY = "use_bidirectional_attention"
"""The key by which embedding servers recognize a bidirectional decoder."""

SENTENCE_TRANSFORMERS_FILES: dict[str, Any] = {
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
"""The fixed files of sentence-transformers, in the form of version 2, which later ones and other programs read."""
NEEDS_VERSION: dict[str, Any] = {"requirements": {"transformers": f">={FLOOR}"}}
"""A bidirectional decoder's requirement, which sentence-transformers has checked since 6.2."""


def averages_alone(folder: Path) -> bool:
    """Tell whether a folder's files of sentence-transformers are those of an export, by which it only averages the
    tokens of a text."""
    for name, content in SENTENCE_TRANSFORMERS_FILES.items():
        saved = read_json(folder / name) if (folder / name).exists() else None
        if saved != content and not (isinstance(content, dict) and saved == content | NEEDS_VERSION):
            return False
    return takes_mean(folder)


POOLING_KEYS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
"""The names of poolings in that form: `mean`, for example, is `mean_tokens`."""


def export_checkpoint(
    reference: str, folder: Path, merge: float | None = None, complete: Callable[[Path], None] = write_golden
) -> str:
    """Write the checkpoint `RUN[@STEP]` as a model folder; return lines that say how to load it.

    Before the folder takes its name, transformers alone loads it, and must compute the logits of the packed network and
    attend in the direction of the last objective. If `AutoTokenizer` would split texts differently than in training,
    the lines say so, and the folder has no files for sentence-transformers.

    Args:
        merge: first average the network with the decoder that it came from, with this weight for the decoder.
        complete: the function that adds files to the folder after the proof, the golden vectors last.

    Raises:
        InputError: no such checkpoint, a damaged one, a folder that is not empty, or nothing to merge with.
    """
    source = find_checkpoint(reference)
    manifest = read_checkpoint_manifest(source)
    run = Run(source.parent.parent)
    recipe, network = read_recipe(run), load_model(source / "model")
    merged = "" if merge is None else merge_with_parent(network, run, manifest, merge)
    causal = manifest.is_causal
    exported = network
    if causal and isinstance(network.config, EuroBertConfig):  # the same network in the causal class
        exported = LlamaForCausalLM(as_llama(network.config))
        exported.load_state_dict(network.state_dict(), strict=True)
        exported.published_dropout = network.published_dropout
    kind = language_model_class(exported.config)
    if kind is AutoModelForCausalLM:
        set_direction(exported.config, causal)
    with whole_folder(folder) as part:
        refuse_filled(folder)  # another process may have written it
        save_network(exported, part)
        longest = position_limit(exported) or recipe.data.max_sample_tokens
        tokenizer = export_tokenizer(source / "model", part, exported.config, causal, longest)
        misread_as = misreading_class(tokenizer, exported.config)
        if not causal and not misread_as:  # sentence-transformers loads what AutoTokenizer loads
            write_sentence_transformer(part, exported, longest)
        check_export(part, kind, network, causal)
        draw_curves(run, manifest.run_step, part / "curves.png")
        card = describe_export(run, manifest, folder.name, exported, tokenizer.eos_token, merged, misread_as)
        write_text(part / "README.md", card)
        complete(part)
        mark_successor(part, folder, "encoder")
    looks = "causal" if causal else "bidirectional"
    remarks = f"\n{merged}" if merged else ""
    if manifest.run_step < (planned := recipe.num_steps):
        remarks += f"\n{reference} is at step {manifest.run_step:,} of {planned:,}, before the end of the decay"
    if misread_as:
        remarks += f"\n{MISREAD.format(chosen=misread_as, type=exported.config.model_type)}"
    written, name = read_config(folder).kind, type(exported).__name__  # `complete` may have changed the class
    loaders = f"{kind.__name__} or AutoModel" if written == name else "AutoModel"
    return f"{folder}: {written}, {looks}; load it with {loaders}{remarks}"


def set_direction(config: Any, causal: bool) -> None:
    """Set the direction in a decoder's configuration: transformers 5 reads `is_causal`, other programs
    `use_bidirectional_attention`.

    Types that have the second key themselves (Gemma's) keep its value; types whose windows it changes (Gemma 3n) do not
    get it.
    """
    config.is_causal = causal
    if hasattr(type(config)(), DIRECTION_KEY):
        return
    config.__dict__.pop(DIRECTION_KEY, None)
    marked = copy.copy(config)
    setattr(marked, DIRECTION_KEY, True)
    if not causal and proofs.window_of(type(config).from_dict(marked.to_dict())) == proofs.window_of(config):
        setattr(config, DIRECTION_KEY, True)


def save_encoder(folder: Path, network: PreTrainedModel, tokenizer: Any) -> None:
    """Write a bidirectional network, with its direction in the configuration, and its tokenizer."""
    if getattr(network.config, "is_causal", True) is False:
        set_direction(network.config, causal=False)
    save_network(network, folder)
    tokenizer.save_pretrained(folder)


def as_llama(config: EuroBertConfig) -> Any:
    """Return the configuration of the same network as a Llama."""
    shared = LlamaConfig().to_dict().keys() | {"mask_token_id"}
    shared -= {"architectures", "dtype", "model_type", "transformers_version", "use_cache"}
    return LlamaConfig(**{key: value for key, value in config.to_dict().items() if key in shared})


@torch.no_grad()
def check_export(folder: Path, kind: Any, network: PreTrainedModel, causal: bool) -> None:
    """Load the folder as a user would, and prove its logits and its direction.

    The logits must equal the packed network's. Two texts that differ in their last token show the direction. Windows,
    if any, are narrowed in both. Raises `FailedProofError`.
    """
    settings: Any = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
    reloaded = kind.from_pretrained(folder, **settings).eval()
    if proofs.window_of(reloaded.config) != proofs.window_of(network.config):
        raise FailedProofError(f"{folder}: its window differs from that in training")
    longest = position_limit(network) or 2**31
    reloaded, packed = proofs.with_windows(reloaded, longest), proofs.with_windows(network.eval(), longest)
    length = min(max(proofs.PROOF_LENGTHS), longest)
    last, changed, *tokens = proofs.telling_tokens(network, length + 1).tolist()
    tokens_T, changed_T = torch.tensor([*tokens, last]), torch.tensor([*tokens, changed])
    layout = lay_out(np.array([0, length]), causal=causal)
    hidden_TD = packed_hidden(packed.base_model, tokens_T, torch.arange(length), layout)
    head = LanguageModelHead(network)
    ours_TV = torch.nn.functional.linear(head(hidden_TD), *head.weights())
    ours_TV = head.softcap * torch.tanh(ours_TV / head.softcap) if head.softcap else ours_TV
    theirs_TV = reloaded(input_ids=tokens_T[None]).logits[0]
    if not proofs.agree(ours_TV, theirs_TV):
        raise FailedProofError(f"{type(reloaded).__name__} of plain transformers computes different logits")
    moved_T = proofs.relative_moves(theirs_TV, reloaded(input_ids=changed_T[None]).logits[0])
    does_move = moved_T[-1 - proofs.reach(reloaded) :] > proofs.MOVED_BY_ROUNDING[torch.float32]
    if not does_move[-1]:
        raise FailedProofError(f"{folder}: the proof cannot tell which way it looks: changed tokens change no logits")
    if does_move[:-1].any() if causal else not does_move.all():
        direction = "causal" if causal else "bidirectional"
        raise FailedProofError(f"{type(reloaded).__name__} of plain transformers is not {direction}")


def export_tokenizer(source: Path, folder: Path, config: Any, causal: bool, longest: int) -> Any:
    """Write a checkpoint's tokenizer for a network of this configuration and texts of up to `longest` tokens; return
    it."""
    tokenizer = load_tokenizer(source)
    tokenizer.model_max_length = longest
    if causal:
        # `generate` continues from the end of a row; transformers saves only `init_kwargs`.
        tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "left"
    else:
        close_texts(tokenizer)
    tokenizer.save_pretrained(folder)
    # transformers 4 does not know version 5's name of the generic class. This is welcome, because it would silently run
    # a bidirectional network as a causal one. It computes a causal Llama with plain positions correctly, so such a
    # folder has a name that it knows.
    plain_rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if causal and config.model_type == "llama" and config.rope_parameters == plain_rope:
        path = folder / "tokenizer_config.json"
        settings = read_json_as(path, dict[str, Any])
        if settings.get("tokenizer_class") == "TokenizersBackend":
            write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return tokenizer


def close_texts(tokenizer: Any) -> None:
    """Make a tokenizer end each text with the end-of-text token, as training and evaluation do.

    A tokenizer with a classification token opens texts with it and closes them with its separator. It pads batches on
    the right, because positions count from a row's first token, padding included, and cuts long texts there.
    """
    from tokenizers.processors import TemplateProcessing

    tokenizer.padding_side = tokenizer.truncation_side = "right"
    marks, single, pair = {"EOS": tokenizer.eos_token}, "$A EOS", "$A EOS $B EOS"
    if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
        closed = tokenizer("a")["input_ids"]
        if len(closed) > 2 and (closed[0], closed[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id):
            return
        marks, single, pair = {"CLS": tokenizer.cls_token, "EOS": tokenizer.sep_token}, f"CLS {single}", f"CLS {pair}"
    # The template uses a token's own name, because transformers.js looks it up. A name with a colon or a dollar sign
    # means something else in a template, so it keeps its alias.
    names = {alias: alias if re.search("[:$]", mark) else mark for alias, mark in marks.items()}
    special = [
        {"id": names[alias], "ids": [tokenizer.convert_tokens_to_ids(mark)], "tokens": [mark]}
        for alias, mark in marks.items()
    ]
    alone, paired = ([names.get(piece, piece) for piece in template.split()] for template in (single, pair))
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=alone, pair=paired, special_tokens=special)


def write_sentence_transformer(
    folder: Path,
    network: PreTrainedModel,
    max_length: int,
    *,
    pooling: str = "mean",
    further: Sequence[str] = (),
    prompts: Mapping[str, str] | None = None,
) -> None:
    """Write the files by which sentence-transformers loads a model folder, for texts of up to `max_length` tokens.

    Args:
        further: the classes of the modules after network and pooling; the caller writes their folders, such as
            `2_Dense`.
    """
    files = SENTENCE_TRANSFORMERS_FILES
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for index, kind in enumerate(further, start=len(files["modules.json"]))
    ]
    write_json(folder / "modules.json", [*files["modules.json"], *modules])
    config = "config_sentence_transformers.json"
    needs = NEEDS_VERSION if getattr(network.config, "is_causal", True) is False else {}
    write_json(folder / config, files[config] | {"prompts": dict(prompts or {})} | needs)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    (folder / "1_Pooling").mkdir()
    content: dict[str, Any] = {"word_embedding_dimension": output_width(network.config)}
    content |= {f"pooling_mode_{key}": pooling == re.sub("_tokens?$", "", key) for key in POOLING_KEYS}
    write_json(folder / "1_Pooling" / "config.json", content)
