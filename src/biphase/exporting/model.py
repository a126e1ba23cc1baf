"""A checkpoint → a folder that transformers loads: weights, configuration that says which way to look, tokenizer, card.

One that looks both ways is a folder for sentence-transformers too: mean pooling over the tokens of a text.

EuroBERT has no causal class, but a EuroBERT is a Llama without its causal mask: weight for weight the same network. So
a run that ended looking back only is written as Llama, any other as EuroBERT. An adapted decoder keeps its own
class; `is_causal` in its configuration tells transformers to look both ways."""

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
from biphase.encoder.network import language_model_class, layer_cosines, load_model, merge_weights
from biphase.encoder.packed import head_bias, head_input, packed_hidden
from biphase.encoder.proofs import FailedProofError
from biphase.errors import InputError
from biphase.exporting.card import FLOOR, MISREAD, describe_export, draw_curves
from biphase.exporting.golden import write_golden
from biphase.files import read_json_as, refuse_filled, whole_folder, write_json, write_mark, write_text
from biphase.hub import fetch_model, model_fingerprint, output_width, position_limit
from biphase.recipe import Recipe
from biphase.run import CheckpointManifest, Run, find_checkpoint, read_checkpoint_manifest, read_recipe


def merge_with_parent(network: PreTrainedModel, run: Run, manifest: CheckpointManifest, share: float) -> str:
    """Average the network, in place, with the decoder that it came from, which has that share; return a line about it.

    The decoder is taken as it was when training began: tokens that it lacked, such as the mask token, had their rows.

    Raises:
        InputError: the run looks back only or began with random weights, or its parent is not at hand or has changed.
    """
    if not 0 < share < 1:
        raise InputError(f"merge {share:g} is no share of the parent: give one above 0 and below 1, such as 0.5")
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
    """Find the nearest ancestor that looked back only, or the model of others at the beginning: its name, its model
    folder and the recipe of the run that started from it."""
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
        raise InputError(f"{init.checkpoint} is not what {run.path} started from: it was trained anew since")
    parent_run = Run(folder.parent.parent)
    if not parent.is_causal:
        return find_decoder(parent_run, parent)
    return f"{parent_run.path.name}@{parent.step}", folder / "model", recipe


DIRECTION_KEY = "use_bidirectional_attention"
"""The key by which servers of embeddings know a decoder that looks both ways."""

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
"""The fixed files of sentence-transformers, in the spelling of version 2, which later ones and other programs read."""
NEEDS_VERSION: dict[str, Any] = {"requirements": {"transformers": f">={FLOOR}"}}
"""The requirement of a decoder that looks both ways; sentence-transformers 6.2 and later heed it."""

POOLING_KEYS = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
"""What that spelling calls ways of pooling: `mean`, for example, `mean_tokens`."""


def export_checkpoint(
    reference: str, folder: Path, merge: float | None = None, complete: Callable[[Path], None] | None = None
) -> str:
    """Write the checkpoint `RUN[@STEP]` as a model folder; returns lines that say how to load it.

    Where `AutoTokenizer` would read texts otherwise than in training, they say so, and the folder is none for
    sentence-transformers.

    With `merge`, it is averaged with the decoder that it came from first, which has that share of the result. Before
    the folder takes its name it is loaded back with transformers alone, must give the same logits as the packed
    network, and must be causal or bidirectional as the last objective was. `complete` adds to it then.

    Raises:
        InputError: no such checkpoint, a damaged one, a folder that holds something else, or nothing to merge with.
    """
    source = find_checkpoint(reference)
    manifest = read_checkpoint_manifest(source)
    run = Run(source.parent.parent)
    recipe, network = read_recipe(run), load_model(source / "model")
    merged = "" if merge is None else merge_with_parent(network, run, manifest, merge)
    causal = manifest.is_causal
    exported = network
    if causal and isinstance(network.config, EuroBertConfig):  # the same network in the class that looks back
        exported = LlamaForCausalLM(as_llama(network.config))
        exported.load_state_dict(network.state_dict(), strict=True)
    kind = language_model_class(exported.config)
    if kind is AutoModelForCausalLM:
        set_direction(exported.config, causal)
    with whole_folder(folder) as part:
        refuse_filled(folder)  # another process may have written it meanwhile
        exported.save_pretrained(part)
        longest = position_limit(exported) or recipe.data.max_sample_tokens
        tokenizer = export_tokenizer(source / "model", part, exported.config, causal, longest)
        misread_as = misreading_class(tokenizer, exported.config)
        if not causal and not misread_as:  # sentence-transformers takes what AutoTokenizer takes
            write_sentence_transformer(part, exported, longest)
        check_export(part, kind, network, causal)
        write_golden(part)
        draw_curves(run, manifest.run_step, part / "curves.png")
        card = describe_export(run, manifest, folder.name, exported, tokenizer.eos_token, merged, misread_as)
        write_text(part / "README.md", card)
        if complete is not None:
            complete(part)
        write_mark(part, "encoder")
    looks = "causal" if causal else "bidirectional"
    remarks = f"\n{merged}" if merged else ""
    if manifest.run_step < (planned := recipe.num_steps):
        remarks += f"\n{reference} is at step {manifest.run_step:,} of {planned:,}, before the end of the decay"
    if misread_as:
        remarks += f"\n{MISREAD.format(chosen=misread_as, type=exported.config.model_type)}"
    return f"{folder}: {type(exported).__name__}, {looks}; load it with {kind.__name__} or AutoModel{remarks}"


def set_direction(config: Any, causal: bool) -> None:
    """Say in a decoder's configuration which way it looks: transformers 5 reads `is_causal`, other tools
    `use_bidirectional_attention`.

    Types that have the second of their own (Gemma's) keep theirs, and those that would write another window beside it
    (Gemma 3n) go without.
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
    """Write a network that looks both ways, whose configuration then says so, and its tokenizer."""
    if getattr(network.config, "is_causal", True) is False:
        set_direction(network.config, causal=False)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def as_llama(config: EuroBertConfig) -> Any:
    """Configure the same network as a Llama."""
    shared = LlamaConfig().to_dict().keys() | {"mask_token_id"}
    shared -= {"architectures", "dtype", "model_type", "transformers_version", "use_cache"}
    return LlamaConfig(**{key: value for key, value in config.to_dict().items() if key in shared})


@torch.no_grad()
def check_export(folder: Path, kind: Any, network: PreTrainedModel, causal: bool) -> None:
    """Load the folder as a user would, and compare with the packed network on two sequences that differ at the end,
    both with narrow windows where they have any."""
    reloaded = kind.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
    if proofs.window_of(reloaded.config) != proofs.window_of(network.config):
        raise FailedProofError(f"{folder}: its window is another than in training")
    longest = position_limit(network) or 2**31
    reloaded, packed = proofs.with_windows(reloaded, longest), proofs.with_windows(network.eval(), longest)
    length = min(max(proofs.PROOF_LENGTHS), longest)
    last, changed, *tokens = proofs.telling_tokens(network, length + 1).tolist()
    tokens_T, changed_T = torch.tensor([*tokens, last]), torch.tensor([*tokens, changed])
    layout = lay_out(np.array([0, length]), causal=causal)
    hidden_TD = packed_hidden(packed.base_model, tokens_T, torch.arange(length), layout)
    head = network.get_output_embeddings()
    softcap = getattr(network.config, "final_logit_softcapping", None)
    ours_TV = torch.nn.functional.linear(head_input(network, hidden_TD), head.weight, head_bias(network))
    ours_TV = softcap * torch.tanh(ours_TV / softcap) if softcap else ours_TV
    theirs_TV = reloaded(input_ids=tokens_T[None]).logits[0]
    if not proofs.agree(ours_TV, theirs_TV):
        raise FailedProofError(f"{type(reloaded).__name__} of plain transformers computes something else than trained")
    moved_T = proofs.relative_moves(theirs_TV, reloaded(input_ids=changed_T[None]).logits[0])
    does_move = moved_T[-1 - proofs.reach(reloaded) :] > proofs.MOVED_BY_ROUNDING[torch.float32]
    if not does_move[-1]:
        raise FailedProofError(f"{folder}: the proof cannot tell which way it looks: changed tokens change no logits")
    if does_move[:-1].any() if causal else not does_move.all():
        direction = "causal" if causal else "bidirectional"
        raise FailedProofError(f"{type(reloaded).__name__} of plain transformers is not {direction}")


def export_tokenizer(source: Path, folder: Path, config: Any, causal: bool, longest: int) -> Any:
    """Write a checkpoint's tokenizer as the exported network of this configuration needs it, which reads texts of up to
    `longest` tokens, and return it."""
    tokenizer = load_tokenizer(source)
    tokenizer.model_max_length = longest
    if causal:
        tokenizer.padding_side = "left"  # `generate` goes on from the end of a row
    else:
        close_texts(tokenizer)
    tokenizer.save_pretrained(folder)
    # transformers 4 refuses the name that 5 gives to the generic class, which keeps it from running, causal without a
    # word, what looks both ways. A Llama it computes alike, unless another key says how its positions turn.
    plain_rope = {"rope_type": "default", "rope_theta": 10_000.0}
    if causal and config.model_type == "llama" and config.rope_parameters == plain_rope:
        path = folder / "tokenizer_config.json"
        settings = read_json_as(path, dict[str, Any])
        if settings.get("tokenizer_class") == "TokenizersBackend":
            write_json(path, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})
    return tokenizer


def close_texts(tokenizer: Any) -> None:
    """Make a tokenizer end each text with the end-of-text token, as training and evaluation do.

    One that has a classification token opens texts with it and closes them with its separator. Batches are padded on
    the right: positions count from a row's first token, padding included.
    """
    from tokenizers.processors import TemplateProcessing

    tokenizer.padding_side = "right"
    marks, single, pair = {"EOS": tokenizer.eos_token}, "$A EOS", "$A EOS $B EOS"
    if tokenizer.cls_token_id is not None and tokenizer.sep_token_id is not None:
        closed = tokenizer("a")["input_ids"]
        if len(closed) > 2 and (closed[0], closed[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id):
            return
        marks, single, pair = {"CLS": tokenizer.cls_token, "EOS": tokenizer.sep_token}, f"CLS {single}", f"CLS {pair}"
    # In the template a token has its own name, which transformers.js looks up; one with a colon or a dollar sign would
    # be read as something else there, and keeps its alias.
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
    """Write the files that make a model folder one of sentence-transformers: the network, the pooling of its tokens,
    and the classes of `further` modules. The modules' own folders, such as `2_Dense`, are not written.

    Texts are cut at `max_length` tokens.
    """
    files = SENTENCE_TRANSFORMERS_FILES
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(further, start=len(files["modules.json"]))
    ]
    write_json(folder / "modules.json", [*files["modules.json"], *modules])
    config = "config_sentence_transformers.json"
    needs = NEEDS_VERSION if getattr(network.config, "is_causal", True) is False else {}
    write_json(folder / config, files[config] | {"prompts": dict(prompts or {})} | needs)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{key}": pooling == re.sub("_tokens?$", "", key) for key in POOLING_KEYS}
    write_json(
        folder / "1_Pooling" / "config.json", {"word_embedding_dimension": output_width(network.config), **modes}
    )
