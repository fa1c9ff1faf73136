from __future__ import annotations

import pytest
import torch
from torch import Tensor

from device_communicators.base.errors import InvalidArgumentError
from tests.contract.carriers import Carrier, Member
from tests.contract.cases import Form, reduced, small_numbers
from tests.helpers.doors import call_op

SHAPES = ((4, 3), (32, 64))
CASES = [(shape, dim, layout) for shape in SHAPES for dim in (0, 1) for layout in ("contiguous", "strided")]


def _out(shape: torch.Size, layout: str) -> Tensor:
    if layout == "contiguous":
        return torch.full(shape, -1.0)
    return torch.full((*shape[:-1], 2 * shape[-1]), -1.0)[..., ::2]


def _of_ranks(member: Member, shape: tuple[int, ...]) -> list[Tensor]:
    return member.of_ranks(lambda rank: small_numbers(Form(shape), torch.float32, rank))


def _check(found: Tensor, out: Tensor, expected: Tensor, version: int) -> None:
    assert found is out and torch.equal(out, expected)
    assert out._version > version, "autograd must detect the write"


def _body(member: Member) -> None:
    group, size = member.group, member.size
    for shape, dim, layout in CASES:
        xs = _of_ranks(member, shape)
        x = xs[member.rank]
        with member.case(f"all_gather of {shape} along {dim} into a {layout} tensor"):
            out = _out(torch.cat(xs, dim).shape, layout)
            version = out._version
            _check(group.all_gather(x, dim, out=out), out, torch.cat(xs, dim), version)
        wide = _of_ranks(member, tuple(n * size if at == dim else n for at, n in enumerate(shape)))
        with member.case(f"reduce_scatter to {shape} along {dim} into a {layout} tensor"):
            out = _out(x.shape, layout)
            version = out._version
            expected = reduced(wide, "sum").chunk(size, dim)[member.rank]
            _check(group.reduce_scatter(wide[member.rank], dim, out=out), out, expected, version)
        with member.case(f"all_to_all of slices of {shape} along {dim} into a {layout} tensor"):
            out = _out(wide[0].shape, layout)
            version = out._version
            expected = torch.cat([each.chunk(size, dim)[member.rank] for each in wide], dim)
            _check(group.all_to_all(wide[member.rank], dim, dim, out=out), out, expected, version)


def test_the_result_is_in_out(carrier: Carrier) -> None:
    carrier.run(_body)


def _as_torch_body(member: Member) -> None:
    group, size = member.group, member.size
    for shape in SHAPES:
        xs = _of_ranks(member, shape)
        x = xs[member.rank]
        with member.case(f"by torch's names, {shape}"):
            for stacked in (False, True):
                gathered = torch.stack(xs) if stacked else torch.cat(xs)
                out = torch.empty_like(gathered)
                assert group.all_gather_into_tensor(out, x) is out and torch.equal(out, gathered)
                out = torch.empty_like(x)
                own = torch.stack([x] * size) if stacked else torch.cat([x] * size)
                assert group.reduce_scatter_tensor(out, own) is out and torch.equal(out, reduced(xs, "sum"))
            out = torch.empty_like(torch.cat(xs))
            assert group.all_to_all_single(out, torch.cat([x] * size)) is out and torch.equal(out, torch.cat(xs))
            if not member.simulated and size > 1:
                rows = [1 + rank for rank in range(size)]
                out = x.new_empty((size * rows[member.rank], shape[1]))
                mine = torch.cat([x[:1]] * sum(rows))
                group.all_to_all_single(out, mine, [rows[member.rank]] * size, rows)
                assert torch.equal(out, torch.cat([each[:1].expand(rows[member.rank], -1) for each in xs]))


def test_torchs_names(carrier: Carrier) -> None:
    carrier.run(_as_torch_body)


def _gradient_body(member: Member) -> None:
    for shape in SHAPES:
        with member.case(f"{shape}"):
            x = torch.ones(shape, requires_grad=True)
            out = member.group.all_gather(x, 0, out=torch.empty(shape[0] * member.size, *shape[1:]))
            out.sum().backward()
            assert x.grad is not None and torch.equal(x.grad, torch.full(shape, float(member.size)))
            with torch.no_grad():
                assert not member.group.all_gather(x, 0, out=torch.empty_like(out)).requires_grad
            leaf = torch.empty_like(out, requires_grad=True)
            with pytest.raises(InvalidArgumentError, match="can't be a leaf that requires a gradient"):
                member.group.all_gather(x, 0, out=leaf)
            if member.size > 1:
                with pytest.raises(InvalidArgumentError, match="don't pass out="):
                    call_op(member.group, "all_gather_into", x, torch.empty_like(out), 0)


def test_gradients(group_carrier: Carrier) -> None:
    group_carrier.run(_gradient_body)


def _aliased_body(member: Member) -> None:
    size, rank = member.size, member.rank
    for rows in (2, 256):
        with member.case(f"{rows} rows"):
            xs = member.of_ranks(lambda rank, rows=rows: torch.full((rows, 8), float(rank)))
            buffer = torch.zeros(size * rows, 8)
            own = buffer[rank * rows : (rank + 1) * rows]
            own.copy_(xs[rank])
            member.group.all_gather(own, 0, out=buffer)
            assert torch.equal(buffer, torch.cat(xs))
            whole = buffer.clone()
            member.group.reduce_scatter(buffer, 0, out=own)
            assert torch.equal(own, size * whole[rank * rows : (rank + 1) * rows])


def test_an_input_may_be_a_part_of_out(group_carrier: Carrier) -> None:
    group_carrier.run(_aliased_body)


def _wrong_body(member: Member) -> None:
    x, size = torch.ones(4 * member.size, 3), member.size
    wrong = {
        "reduce_scatter": lambda: member.group.reduce_scatter(x, 0, out=torch.empty(5, 3)),
        "all_to_all": lambda: member.group.all_to_all(x, out=torch.empty(4 * size, 3, dtype=torch.float64)),
        "all_gather": lambda: member.group.all_gather_into_tensor(torch.empty(1), x),
    }
    for name, call in wrong.items():
        with member.case(name), pytest.raises(InvalidArgumentError, match=f"out= of {name} .* must have shape"):
            call()


def test_an_out_that_does_not_fit(group_carrier: Carrier) -> None:
    group_carrier.run(_wrong_body)


def _lists_body(member: Member) -> None:
    group, sizes = member.group, list(range(1, member.size + 1))
    if member.simulated:
        sizes = [2] * member.size
    with member.case("all_gatherv and reduce_scatterv of lists"):
        pairs = member.of_ranks(lambda rank: [torch.full((sizes[rank], 3), rank), torch.full((sizes[rank],), 2.0)])
        found = group.all_gatherv(pairs[member.rank], sizes=sizes)
        assert isinstance(found, list)
        for at, each in enumerate(found):
            assert torch.equal(each, torch.cat([pair[at] for pair in pairs]))
        back = group.reduce_scatterv(found, 0, sizes)
        for mine, each in zip(pairs[member.rank], back, strict=True):
            assert torch.equal(each, member.size * mine)
        assert group.all_gatherv([]) == []


def test_lists_with_sizes(carrier: Carrier) -> None:
    carrier.run(_lists_body)


def _batch_body(member: Member) -> None:
    peers = [rank for rank in range(member.size) if rank != member.rank]
    if member.simulated or not peers:
        member.cases += 1
        return
    for numbers in (3, 400_000):
        with member.case(f"{numbers} numbers"):
            turned = peers[member.rank % len(peers) :] + peers[: member.rank % len(peers)]
            sends = [("isend", torch.full((numbers,), float(10 * member.rank + peer)), peer) for peer in turned]
            outs = {peer: _out(torch.Size([numbers]), "strided" if peer % 2 else "contiguous") for peer in peers}
            receives = [("irecv", outs[peer], peer) for peer in peers]
            batch = sends + receives if member.rank % 2 else receives + sends
            handles = member.group.batch_isend_irecv(batch)
            for handle in handles if member.rank % 2 else reversed(handles):
                handle.wait()
            for peer, out in outs.items():
                assert torch.equal(out, torch.full((numbers,), float(10 * peer + member.rank))), peer
    with member.case("wrong ones"):
        for wrong in (("send", torch.ones(1), peers[0]), ("isend", torch.ones(1), member.size)):
            with pytest.raises(InvalidArgumentError, match="batch_isend_irecv"):
                member.group.batch_isend_irecv([wrong])
        assert member.group.batch_isend_irecv([]) == []


def test_transfers_in_a_batch(carrier: Carrier) -> None:
    carrier.run(_batch_body)
