"""Byte-level BPE from GGUF metadata: a vocabulary of all 256 bytes, a few merges and ChatML's tokens."""

from __future__ import annotations

import pytest

pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")

from tree_attention_jax.models.tokenizer import SMOLLM2_SYSTEM, GGUFTokenizer  # noqa: E402

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BYTES = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
MERGED = ["he", "ll", "hell", "hello", "Ġhello", "12"]
VOCABULARY = [*CONTROL, *BYTES, *MERGED]
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]
TEXTS = [
    "hello hello",
    "  two  spaces\n\n\ttabs ",
    "don't I'LL ünïcode 日本語 🎉",
    "a 12 b1234",
    "x<|im_end|>y",
    "",
]


@pytest.fixture
def tokenizer_metadata():
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(VOCABULARY) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def ids(*tokens: str) -> list[int]:
    return [VOCABULARY.index(token) for token in tokens]


@pytest.mark.parametrize("words", ["smollm", "llama-bpe", "gpt-2"])
@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(write_gguf, tokenizer_metadata, words, text):
    tokenizer = GGUFTokenizer(write_gguf(metadata=tokenizer_metadata | {"tokenizer.ggml.pre": words}))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_and_digits(write_gguf, tokenizer_metadata):
    tokenizer = GGUFTokenizer(write_gguf(metadata=tokenizer_metadata))
    assert tokenizer.encode("hello hello") == ids("hello", "Ġhello")
    assert tokenizer.encode("12") == ids("1", "2")  # digits one by one, whatever the merges say
    tokenizer = GGUFTokenizer(write_gguf(metadata=tokenizer_metadata | {"tokenizer.ggml.pre": "gpt-2"}))
    assert tokenizer.encode("12") == ids("12")


def test_control_tokens_only_on_request(write_gguf, tokenizer_metadata):
    tokenizer = GGUFTokenizer(write_gguf(metadata=tokenizer_metadata))
    assert tokenizer.encode("<|im_end|>", special=True) == ids("<|im_end|>")
    assert 2 not in tokenizer.encode("<|im_end|>")
    assert tokenizer.stop_ids == {2}
    assert tokenizer.bos_id is None


def test_chatml(write_gguf, tokenizer_metadata):
    tokenizer = GGUFTokenizer(write_gguf(metadata=tokenizer_metadata))
    user = {"role": "user", "content": "hello<|im_end|>"}
    prompt = tokenizer.chat([user])
    assert tokenizer.decode(prompt) == (
        f"<|im_start|>system\n{SMOLLM2_SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt.count(2) == 2  # the user's own <|im_end|> is text
    assert tokenizer.prompt("hello<|im_end|>") == prompt
    system = {"role": "system", "content": "hi"}
    assert tokenizer.chat([system, user]) == tokenizer.chat([user], system="hi")
    assert tokenizer.decode(tokenizer.chat([user], system=None)).startswith("<|im_start|>user\nhello")


def test_without_chatml_the_prompt_is_plain(write_gguf, tokenizer_metadata):
    plain = [token.replace("im_", "x_") for token in VOCABULARY]
    metadata = tokenizer_metadata | {"tokenizer.ggml.tokens": plain, "tokenizer.ggml.add_bos_token": True}
    tokenizer = GGUFTokenizer(write_gguf(metadata=metadata))
    assert tokenizer.prompt("hello") == [1, *ids("hello")]
    with pytest.raises(ValueError, match="im_start"):
        tokenizer.chat([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, NotImplementedError, "tokenizer.ggml.model 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, NotImplementedError, "tokenizer.ggml.pre 'tekken'"),
        ({"tokenizer.ggml.merges": None}, ValueError, "'tokenizer.ggml.merges' is missing"),
        ({"tokenizer.ggml.model": None}, ValueError, "'tokenizer.ggml.model' is missing"),
    ],
)
def test_vocabularies_it_cannot_read(write_gguf, tokenizer_metadata, change, error, message):
    path = write_gguf(metadata=tokenizer_metadata | change)
    with pytest.raises(error, match=message) as caught:
        GGUFTokenizer(path)
    assert str(path) in str(caught.value)
