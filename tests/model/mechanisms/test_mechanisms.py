"""Properties of all mechanisms: stepping equals the parallel form, and gradients are correct."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from model.config import MECHANISMS
from model.mechanisms import linear, prefix
from model.mechanisms.interests import Interests
from model.mechanisms.linear import Linear
from model.mechanisms.mechanism import Events
from model.mechanisms.network import DistinctItems, MechanismNetwork
from model.mechanisms.quantiser import TEMPERATURE, Quantiser, StraightThrough
from model.mechanisms.softmax import Softmax
from tests.model.mechanisms.small_mechanisms import ITEMS, network

CONSTANT = [name for name in MECHANISMS if network(name).mechanism.state_shape is not None]


def test_only_three_mechanisms_have_states_of_growing_size() -> None:
    assert set(MECHANISMS) - set(CONSTANT) == {"transformer-paper", "transformer-codes", "lightsans-decoupled"}


@pytest.mark.parametrize("name", CONSTANT)
@torch.inference_mode()
def test_steps_equal_the_parallel_forward(name: str) -> None:
    """For as many events as the published presets have positions."""
    net = network(name, window=300)
    items, lengths = torch.randint(ITEMS, (3, 300)), torch.tensor([300, 1, 123])
    distinct = net.distinct(items)
    parallel = net(items, lengths, distinct)
    for event, stepped in enumerate(steps(net, items, distinct)):
        real = lengths > event
        torch.testing.assert_close(stepped[real], parallel[real, event], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONSTANT)
def test_parallel_gradients_equal_those_of_stepping(name: str) -> None:
    """For every parameter, the manual backward pass against autograd through the steps."""
    net = network(name).double()
    items, wanted = torch.randint(ITEMS, (2, 9)), torch.randn(2, 9, 12, dtype=torch.float64)
    lengths = torch.tensor([9, 9])
    distinct = net.distinct(items)
    (net(items, lengths, distinct) * wanted).sum().backward()
    found = {name: weights.grad for name, weights in net.named_parameters()}
    net.zero_grad(set_to_none=True)
    distinct = net.distinct(items)
    (torch.stack(steps(net, items, distinct), dim=1) * wanted).sum().backward()
    for name, weights in net.named_parameters():
        if weights.grad is None:
            assert found[name] is None, name  # of targets
        else:
            torch.testing.assert_close(found[name], weights.grad, rtol=1e-6, atol=1e-9, msg=name)


def steps(net: MechanismNetwork, items: torch.Tensor, distinct: DistinctItems) -> list[torch.Tensor]:
    """Queries after each event of histories of equal length, from the state alone."""
    assert net.mechanism.state_shape is not None
    state, queries = distinct.targets.new_zeros(len(items), *net.mechanism.state_shape), []
    for event in range(items.shape[1]):
        state, query = net.step(state, torch.full((len(items),), event), items[:, event], distinct)
        queries.append(query)
    return queries


@pytest.mark.parametrize("name", MECHANISMS)
@torch.inference_mode()
def test_outputs_are_causal_and_ignore_padding(name: str) -> None:
    net = network(name)
    items = torch.randint(ITEMS, (2, 20))
    changed = items.clone()
    changed[:, 12:] = torch.randint(ITEMS, (2, 8))
    before = net(items, torch.tensor([20, 20]), net.distinct(items))
    after = net(changed, torch.tensor([20, 12]), net.distinct(changed))
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=1e-4, atol=1e-5)


class TestHistograms:
    """The pass over prefixes against histograms counted individually."""

    def case(self, seed: int = 0) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(seed)
        codes = torch.rand(6, 2, 4, dtype=torch.float64, requires_grad=True)
        logits = torch.randn(6, 2, 4, dtype=torch.float64, requires_grad=True)
        return codes, logits, torch.randint(6, (3, 5)), torch.tensor([5, 3, 1])

    def test_shares_equal_counted_histograms(self) -> None:
        codes, logits, places, lengths = self.case()
        found = prefix.shares(codes, logits, places, lengths, 0.8)
        for row in range(3):
            for event in range(5):
                if event >= lengths[row]:
                    assert (found[row, event] == 0).all()
                    continue
                past = places[row, : event + 1]
                counts = sum(codes[item] * 0.8 ** (event - at) for at, item in enumerate(past))
                mass = counts * logits[places[row, event]].exp()
                torch.testing.assert_close(found[row, event], (mass / mass.sum(-1, keepdim=True)).flatten())

    def test_gradients_are_correct(self) -> None:
        codes, logits, places, lengths = self.case()
        assert gradcheck(lambda codes, logits: prefix.shares(codes, logits, places, lengths, 0.8), (codes, logits))

    def test_extreme_logits_are_stable(self) -> None:
        codes, logits, places, lengths = self.case()
        hard = torch.nn.functional.one_hot(codes.argmax(-1), 4).double().requires_grad_()
        prefix.shares(hard, logits * 1e4, places, lengths, 0.8).square().sum().backward()
        assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in (hard, logits))


class TestLinear:
    def test_lookups_equal_summed_outer_products(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linear, "EVENTS_PER_CHUNK", 4)
        added, queries = torch.randn(2, 11, 3), torch.randn(2, 11, 3)
        states = torch.einsum("sli,slj->slij", added, added).cumsum(1)
        expected = torch.einsum("slij,slj->sli", states, queries)
        torch.testing.assert_close(linear.prefix_lookups(added, queries), expected, rtol=1e-4, atol=1e-5)

    def test_gradients_are_correct(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linear, "EVENTS_PER_CHUNK", 3)
        given = [torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        assert gradcheck(linear.prefix_lookups, given)

    @pytest.mark.parametrize("gated", [False, True])
    def test_the_backward_pass_stores_no_states(self, gated: bool) -> None:
        mechanism, length, memory = Linear(8, 6, gated), 200, 6
        kept: list[int] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            mechanism(events(torch.randn(1, length, 8, requires_grad=True)))
        assert max(kept) < length * memory * memory / 2

    def test_a_gate_scales_features(self) -> None:
        mechanism, hidden = Linear(4, 3, gated=True), torch.randn(2, 4)
        assert mechanism.gate is not None
        projected = mechanism.hidden(hidden)
        added = torch.sigmoid(mechanism.gate(projected)) * projected
        torch.testing.assert_close(mechanism.feature(hidden)[:, :3], added[:, :, None] * added[:, None, :])


@torch.inference_mode()
def test_interests_are_averages_of_attended_events() -> None:
    torch.manual_seed(0)
    mechanism, hidden = Interests(6, 3), torch.randn(1, 9, 6)
    found = mechanism(events(hidden))
    for event in range(9):
        past = hidden[0, : event + 1]
        weights = (20 * torch.tanh(past @ mechanism.aggregate.T / 20)).softmax(dim=0)  # (events, k)
        interests = weights.T @ past
        share = (mechanism.key(interests) @ mechanism.query(hidden[0, event]) / math.sqrt(6)).softmax(dim=0)
        torch.testing.assert_close(found[0, event], mechanism.out(share @ mechanism.value(interests)))


@torch.inference_mode()
def test_decoupled_positions_add_embeddings_of_attended_positions() -> None:
    torch.manual_seed(0)
    mechanism, hidden = Interests(6, 3, window=9), torch.randn(1, 7, 6)
    assert mechanism.places is not None
    without = Interests(6, 3)
    without.load_state_dict(mechanism.state_dict(), strict=False)
    added = mechanism(events(hidden)) - without(events(hidden))
    places = mechanism.places[:5]
    share = (mechanism.place_key(places) @ mechanism.place_query(places[4]) / math.sqrt(6)).softmax(dim=0)
    torch.testing.assert_close(added[0, 4], mechanism.out.weight @ (share @ mechanism.value(hidden[0, :5])))


@torch.inference_mode()
def test_softmax_attends_to_all_events_so_far() -> None:
    torch.manual_seed(0)
    mechanism, hidden = Softmax(6, 2), torch.randn(1, 5, 6)
    queries, keys, values = (part.view(5, 2, 3) for part in mechanism.project(hidden[0]).split(6, dim=-1))
    share = (torch.einsum("khd,hd->kh", keys[:4], queries[3]) / math.sqrt(3)).softmax(dim=0)
    expected = mechanism.out(torch.einsum("kh,khd->hd", share, values[:4]).flatten())
    torch.testing.assert_close(mechanism(events(hidden))[0, 3], expected)


class TestQuantiser:
    def test_each_codebook_encodes_the_residual(self) -> None:
        torch.manual_seed(0)
        made, vectors = Quantiser(5, 3, 4), torch.randn(10, 5)
        encoded = made(vectors)
        left = vectors
        for book in range(3):
            likeness = left @ made.similarity[0] @ made.codebooks[book].T
            assert torch.equal(encoded.codes[:, book].argmax(-1), likeness.argmax(-1))
            left = left - made.codebooks[book][likeness.argmax(-1)]
        torch.testing.assert_close(encoded.vectors, vectors - left)

    def test_ties_go_to_the_first_codeword_and_rows_stay_one_hot(self) -> None:
        shares = torch.tensor([[0.25, 0.25, 0.5, 0.5], [0.1, 0.1, 0.1, 0.1]])
        one_hot = StraightThrough.apply(shares)  # type: ignore[no-untyped-call]
        assert one_hot.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]

    def test_gradients_use_the_straight_through_estimator(self) -> None:
        """Gradients after the choice equal those of the shares it was made from."""
        torch.manual_seed(0)
        made = Quantiser(5, 1, 4).double()
        vectors, wanted = (torch.randn(6, 5, dtype=torch.float64) for _ in range(2))
        made(vectors.requires_grad_()).vectors.backward(wanted)
        own = vectors.detach().clone().requires_grad_()
        share = (own @ made.similarity[0] @ made.codebooks[0].detach().T / TEMPERATURE).softmax(-1)
        (share @ made.codebooks[0].detach()).backward(wanted)
        torch.testing.assert_close(vectors.grad, own.grad)

    def test_soft_codes_sum_to_one(self) -> None:
        codes = Quantiser(5, 3, 4, soft=True)(torch.randn(10, 5)).codes
        assert (codes > 0).all()
        torch.testing.assert_close(codes.sum(-1), torch.ones(10, 3))

    def test_frozen_codes_decode_to_their_vectors(self) -> None:
        made = Quantiser(5, 3, 4)
        encoded = made(torch.randn(10, 5))
        decoded = made.decode(encoded.codes.argmax(-1).byte())
        assert decoded.codes is not None
        assert torch.equal(decoded.codes, encoded.codes)
        torch.testing.assert_close(decoded.vectors, encoded.vectors)


def events(hidden: torch.Tensor) -> Events:
    rows, length = hidden.shape[:2]
    return Events(hidden, None, torch.zeros(rows, length, dtype=torch.int64), torch.full((rows,), length))
