"""Byte-level BPE tokenizers from a GGUF file's metadata, and ChatML prompts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from tree_attention_jax.models.gguf_file import GGUFFile

# What SmolLM2-Instruct was trained to see where a conversation brings no system message of its own.
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

# Llama 3 splits words with a pattern of its own; digits go in threes.
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CONTROL_TOKEN, USER_TOKEN = 3, 4  # values of tokenizer.ggml.token_type


class GGUFTokenizer:
    """Text to token ids and back.

    `bos_id` is None where the file says that prompts don't begin with it; `stop_ids` end a completion.
    """

    def __init__(self, file: GGUFFile | str | os.PathLike[str]):
        """Raises ValueError or NotImplementedError for a vocabulary that is missing or no byte-level BPE."""
        file = GGUFFile.open(file)
        kind = file.require("tokenizer.ggml.model", str)
        if kind != "gpt2":
            raise NotImplementedError(f"{file.path}: tokenizer.ggml.model {kind!r}; it reads byte-level BPE, 'gpt2'")
        tokens = file.require("tokenizer.ggml.tokens", list)
        merges = [tuple(merge.split(" ", 1)) for merge in file.require("tokenizer.ggml.merges", list)]
        kinds = file.get("tokenizer.ggml.token_type", [])
        words, ignore_merges = _word_splitter(file)

        self._ids = {token: index for index, token in enumerate(tokens)}
        self._tokenizer = Tokenizer(BPE(self._ids, merges, ignore_merges=ignore_merges))
        self._tokenizer.pre_tokenizer = words
        self._tokenizer.decoder = decoders.ByteLevel()
        added = [
            (token, kind) for token, kind in zip(tokens, kinds, strict=False) if kind in (CONTROL_TOKEN, USER_TOKEN)
        ]
        self._tokenizer.add_tokens(
            [AddedToken(token, special=kind == CONTROL_TOKEN, normalized=False) for token, kind in added]
        )
        self.vocab_size = len(tokens)
        self.bos_id: int | None = None
        if file.get("tokenizer.ggml.add_bos_token", True):
            self.bos_id = file.get("tokenizer.ggml.bos_token_id")
        stops = (file.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        self.stop_ids = frozenset(stop for stop in stops if stop is not None)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of `text`, without bos. Unless `special`, "<|im_end|>" and its like are ordinary text."""
        self._tokenizer.encode_special_tokens = not special
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of the ids; control tokens print as themselves, bytes that are no UTF-8 as U+FFFD."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def prompt(self, text: str) -> list[int]:
        """Token ids to prefill: a user's turn where the vocabulary has ChatML, else `text` as it is."""
        if self.has_chatml:
            return self.chat([{"role": "user", "content": text}])
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode(text)]

    @property
    def has_chatml(self) -> bool:
        return "<|im_start|>" in self._ids and "<|im_end|>" in self._ids

    def chat(self, messages: Iterable[Mapping[str, str]], system: str | None = SMOLLM2_SYSTEM) -> list[int]:
        """Token ids of a ChatML conversation, open for the assistant's answer.

        messages: {"role": "user", "content": ...}, oldest first. `system` is put before them unless the first
        is a system message itself. Control tokens in contents are encoded as text: no user can end a turn.
        """
        if not self.has_chatml:
            raise ValueError("chat needs the tokens <|im_start|> and <|im_end|>, which this vocabulary hasn't")
        messages = list(messages)
        if system is not None and (not messages or messages[0]["role"] != "system"):
            messages = [{"role": "system", "content": system}, *messages]
        start, end, newline = self._ids["<|im_start|>"], self._ids["<|im_end|>"], self.encode("\n")
        ids = []
        for message in messages:
            ids += [start, *self.encode(f"{message['role']}\n{message['content']}"), end, *newline]
        return [*ids, start, *self.encode("assistant\n")]


def _word_splitter(file: GGUFFile) -> tuple[pre_tokenizers.PreTokenizer, bool]:
    """The pre-tokenizer that `tokenizer.ggml.pre` names, and whether whole words bypass the merges."""
    kind = file.get("tokenizer.ggml.pre", "default")
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]), False
    if kind in ("llama-bpe", "llama3", "llama-v3"):
        words = pre_tokenizers.Split(Regex(LLAMA_3_WORDS), "isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)]), True
    if kind == "gpt-2":
        return gpt2, False
    raise NotImplementedError(f"{file.path}: tokenizer.ggml.pre {kind!r}; it reads 'smollm', 'llama-bpe' and 'gpt-2'")
