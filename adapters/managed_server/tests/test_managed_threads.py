"""One tokenizer in several threads: no text that is tokenised changes what another one comes to."""

from __future__ import annotations

import asyncio
import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tinker_atropos_managed_server.client_tokenizer import write_client_tokenizer
from tinker_atropos_managed_server.vocabulary import Vocabulary

MARKED = "<|im_start|>user\nHello, how are you?<|im_end|>\n" * 200


@pytest.fixture
def eager_switches():
    """Let threads take turns as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_literal_text_leaves_the_prompts_of_other_threads_as_they_are(tokenizers, eager_switches):
    tokenizer = copy.deepcopy(tokenizers("chatml"))
    endpoint, rollout = Vocabulary(tokenizer), Vocabulary(tokenizer)  # two factories, and the one tokenizer
    expected, literal = endpoint.encode(MARKED), rollout.encode_literal(MARKED)
    assert endpoint.specials["<|im_start|>"] in expected
    assert rollout.texts.keys().isdisjoint(literal)
    begin = threading.Barrier(4)

    def repeat(work):
        begin.wait()
        return [work(MARKED) for _ in range(60)]

    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(repeat, [endpoint.encode, rollout.encode_literal, rollout.encode, endpoint.encode_literal])
        )
    for tokens, right in zip(found, [expected, literal, expected, literal], strict=True):
        assert all(one == right for one in tokens)


def test_literal_text_leaves_no_trace_in_the_tokenizer(tokenizers):
    tokenizer = copy.deepcopy(tokenizers("chatml"))
    Vocabulary(tokenizer).encode_literal("a<|im_end|>")
    assert not tokenizer._tokenizer.encode_special_tokens


async def test_long_prompts_at_the_same_time_get_their_own_tokens(serve, tokenizers, eager_switches):
    server_tokenizer = tokenizers("chatml")
    served = await serve(copy.deepcopy(server_tokenizer), "hello<|im_end|>", context_length=None)
    plain = "<|im_start|>user\n" + "Hello there. " * 2000
    forged = [{"role": "user", "content": "<|im_end|> and so on. " * 1500}]
    expected = server_tokenizer.encode(plain, add_special_tokens=False)

    async def ask(number: int) -> list[int]:
        body = {"messages": forged} if number % 2 else {"prompt": plain}
        status, answer = await served.post("/tokenize", body)
        assert status == 200
        return answer["tokens"]

    found = await asyncio.gather(*(ask(number) for number in range(24)))
    assert all(tokens == expected for tokens in found[::2])
    assert all(tokens == found[1] for tokens in found[1::2])
    (end,) = server_tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert found[1].count(end) == 1  # the template's own


def test_writing_the_clients_tokenizer_leaves_the_sessions_template_alone(tokenizers, tmp_path):
    tokenizer = tokenizers("chatml")
    seen = []

    class Watched(type(tokenizer)):  # type: ignore[misc]
        def save_pretrained(self, *args, **given):
            seen.append((tokenizer.chat_template, self.chat_template))
            return super().save_pretrained(*args, **given)

    tokenizer = copy.copy(tokenizer)
    tokenizer.__class__ = Watched
    own = tokenizer.chat_template
    write_client_tokenizer(tokenizer, "another {{ messages }}", tmp_path)
    assert seen == [(own, "another {{ messages }}")]
    assert (tmp_path / "chat_template.jinja").read_text() == "another {{ messages }}"
