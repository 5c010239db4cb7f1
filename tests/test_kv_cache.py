"""The pool's layout, worked out by hand, and the keys that name blocks by content."""

from __future__ import annotations

import hashlib

import pytest
import torch

from scd_trt.kv_cache import KvLayout, block_keys, gather_tokens, num_sent_blocks, scatter_tokens, scope

LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=3, tokens_per_block=4, dtype=torch.float32)
POISON = -7.0


def flat_index(*, head: int, row: int, element: int) -> int:
    """Position inside `H*B*D` as TensorRT-LLM has it: head-major, then token, then element."""
    return (head * 4 + row) * 3 + element


def test_allocated_pool_has_the_documented_shape() -> None:
    pool = LAYOUT.allocate(5)
    assert pool.shape == (5, 2, 2, 2 * 4 * 3)
    assert pool.dtype == torch.float32
    assert LAYOUT.bytes_per_token == 2 * 2 * 2 * 3 * 4
    assert LAYOUT.view(pool).shape == (5, 2, 2, 2, 4, 3)
    assert LAYOUT.view(pool).data_ptr() == pool.data_ptr()


def test_view_refuses_a_foreign_pool() -> None:
    with pytest.raises(ValueError, match=r"pool is \(5, 2, 2, 25\)"):
        LAYOUT.view(torch.zeros(5, 2, 2, 25))
    with pytest.raises(ValueError, match="bfloat16"):
        LAYOUT.view(LAYOUT.allocate(5).bfloat16())


def test_scatter_puts_every_element_where_the_layout_says() -> None:
    pool = LAYOUT.allocate(5).fill_(POISON)
    expected = pool.clone()
    # tokens 3..8 of a sequence in blocks 4, 1, 3: the last row of block 4, all of block 1, the first row of block 3
    k_THD = torch.arange(6 * 2 * 3, dtype=torch.float32).reshape(6, 2, 3)
    v_THD = 100 + k_THD
    for token, (block, row) in enumerate([(4, 3), (1, 0), (1, 1), (1, 2), (1, 3), (3, 0)]):
        for head in range(2):
            for element in range(3):
                where = flat_index(head=head, row=row, element=element)
                expected[block, 1, 0, where] = k_THD[token, head, element]
                expected[block, 1, 1, where] = v_THD[token, head, element]
    scatter_tokens(LAYOUT.view(pool), 1, [4, 1, 3], 3, k_THD=k_THD, v_THD=v_THD)
    assert torch.equal(pool, expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 12), (3, 9), (4, 8), (5, 6), (8, 8)])
def test_gather_returns_what_scatter_wrote(start: int, stop: int) -> None:
    pool = LAYOUT.allocate(5).fill_(POISON)
    k_THD, v_THD = torch.randn(12, 2, 3), torch.randn(12, 2, 3)
    view = LAYOUT.view(pool)
    scatter_tokens(view, 0, [2, 0, 4], 0, k_THD=k_THD, v_THD=v_THD)
    k, v = gather_tokens(view, 0, [2, 0, 4], start, stop)
    assert torch.equal(k, k_THD[start:stop])
    assert torch.equal(v, v_THD[start:stop])
    assert (view[:, 1] == POISON).all()
    assert (view[[1, 3]] == POISON).all()


def test_gather_reads_a_pool_written_by_hand() -> None:
    pool = LAYOUT.allocate(3).fill_(POISON)
    for head in range(2):
        for element in range(3):
            pool[2, 0, 0, flat_index(head=head, row=1, element=element)] = 10 * head + element
            pool[2, 0, 1, flat_index(head=head, row=1, element=element)] = 500 + 10 * head + element
    k, v = gather_tokens(LAYOUT.view(pool), 0, [2], 1, 2)
    assert k.tolist() == [[[0, 1, 2], [10, 11, 12]]]
    assert v.tolist() == [[[500, 501, 502], [510, 511, 512]]]


def test_scatter_rounds_to_the_pool_dtype() -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, tokens_per_block=2, dtype=torch.bfloat16)
    pool = layout.allocate(1)
    x_THD = torch.tensor([[[1.00390625, -3.0]]])  # halfway between two bfloat16 values: rounds to even
    scatter_tokens(layout.view(pool), 0, [0], 0, k_THD=x_THD, v_THD=x_THD)
    assert pool[0, 0, 0].tolist() == [1.0, -3.0, 0.0, 0.0]


def test_block_keys_are_the_chained_hash_of_the_contract() -> None:
    root = hashlib.blake2b(b"the scope", digest_size=16).digest()
    first = hashlib.blake2b(root + bytes([1, 0, 0, 0, 2, 1, 0, 0]), digest_size=16).digest()
    second = hashlib.blake2b(first + bytes([3, 0, 0, 0, 4, 0, 0, 0]), digest_size=16).digest()
    assert block_keys([1, 258, 3, 4, 5], tokens_per_block=2, scope=b"the scope") == [first, second]


def test_block_keys_depend_on_everything_before_them_and_on_nothing_after() -> None:
    tokens = list(range(40))
    keys = block_keys(tokens, tokens_per_block=8, scope=b"s")
    assert len(keys) == 5
    assert block_keys(tokens[:24], tokens_per_block=8, scope=b"s") == keys[:3]
    changed = block_keys([*tokens[:9], 99, *tokens[10:]], tokens_per_block=8, scope=b"s")
    assert changed[0] == keys[0]
    assert not set(changed[1:]) & set(keys)
    assert not set(block_keys(tokens, tokens_per_block=8, scope=b"t")) & set(keys)
    assert block_keys(tokens[:7], tokens_per_block=8, scope=b"s") == []


def test_scope_separates_salts_and_translators() -> None:
    scopes = {scope(fingerprint=f, salt=s) for f in ("aa", "ab") for s in ("", "x", "y")}
    assert len(scopes) == 6


@pytest.mark.parametrize(("prompt", "blocks"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_prompt_token_is_never_in_a_sent_block(prompt: int, blocks: int) -> None:
    assert num_sent_blocks(prompt, 4) == blocks
