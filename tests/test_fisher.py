"""Fisher weights of a cache against plain gradients of a tiny model, label by label and sign by sign."""

from itertools import product

import pytest
import torch
from tiny_models import save_tiny_model

from scd_trt.distill.fisher import SHRINKAGE, ErrorWeights, FisherWeights
from scd_trt.models import cache_layers, forward_with_cache, load_model, trace

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(save_tiny_model(tmp_path_factory.mktemp("m") / "b", num_hidden_layers=2))


@pytest.fixture(scope="module")
def stretched(tmp_path_factory):
    """Its rotation multiplies keys by a factor other than 1, so that a forgotten one shows."""
    path = tmp_path_factory.mktemp("yarn") / "b"
    return load_model(save_tiny_model(path, num_hidden_layers=2, rope_parameters=YARN, max_position_embeddings=1024))


def _ids(num_tokens, seed=0):
    return torch.randint(4, 288, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


class Chosen(FisherWeights):
    """Labels and signs given instead of drawn."""

    def choose(self, labels_T, signs_T):
        self._labels_T, self._signs_T = labels_T, signs_T

    def _signed_score(self, log_p_TV):
        return (log_p_TV[torch.arange(len(log_p_TV)), self._labels_T] * self._signs_T).sum()


def _squared_gradients(loaded, ids, num_prefix, labels_T):
    """Plain: one backward pass per scored position, through pre-RoPE keys; squares summed over positions, in float64."""
    traced = trace(loaded, ids[:num_prefix], capture={"kv"})
    total_L2SF = torch.zeros(loaded.spec.num_layers, 2, num_prefix, loaded.spec.kv_dim, dtype=torch.float64)
    for position, label in enumerate(labels_T.tolist()):
        leaves = [
            (k.clone().requires_grad_(), v.clone().requires_grad_())
            for k, v in zip(traced.k_TF, traced.v_TF, strict=True)
        ]
        before_rotation = type(traced)(k_TF=tuple(k for k, _ in leaves), v_TF=tuple(v for _, v in leaves))
        layers = cache_layers(loaded, before_rotation)
        log_p_TV = forward_with_cache(loaded, ids[num_prefix:], layers, start_position=num_prefix).log_softmax(-1)
        found = torch.autograd.grad(log_p_TV[position, label], [leaf for pair in leaves for leaf in pair])
        for index, gradient in enumerate(found):
            total_L2SF[index // 2, index % 2] += gradient.double().square()
    return total_L2SF


@pytest.mark.parametrize("name", ["model", "stretched"])
def test_mean_over_all_signs_is_the_sum_of_squared_gradients(name, request):
    loaded = request.getfixturevalue(name)
    ids, num_scored = _ids(14), 3
    labels_T = torch.tensor([7, 200, 31])
    expected_L2F = _squared_gradients(loaded, ids, 11, labels_T).mean(2)
    fisher = Chosen(loaded, seed=0)
    patterns = list(product((-1.0, 1.0), repeat=num_scored))
    for signs in patterns:
        fisher.choose(labels_T, torch.tensor(signs))
        fisher.update(ids, scored_tokens=num_scored)
    # sums of squares of float32 gradients, which cancel to a tenth of their size for some signs
    torch.testing.assert_close(fisher.sum_L2F / len(patterns), expected_L2F, rtol=2e-4, atol=1e-4 * expected_L2F.mean())
    mean_L2F = fisher.sum_L2F / (len(patterns) * num_scored)
    shrunk = (1 - SHRINKAGE) * mean_L2F + SHRINKAGE * mean_L2F.mean(-1, keepdim=True)
    # two roundings of a float64 product
    torch.testing.assert_close(fisher.weights().elements_L2F, shrunk, rtol=1e-14, atol=0)


def test_weight_of_a_head_is_what_its_gradient_says_of_any_direction(model):
    """`e' E[g g'] e` is the mean square of `g' e`, for one scored token without a sign to average over."""
    ids, labels_T = _ids(12), torch.tensor([31])
    fisher = Chosen(model, seed=0)
    fisher.choose(labels_T, torch.ones(1))
    fisher.update(ids, scored_tokens=1)
    traced = trace(model, ids[:11], capture={"kv"})
    leaves = tuple(v.clone().requires_grad_() for v in traced.v_TF)
    layers = cache_layers(model, type(traced)(k_TF=traced.k_TF, v_TF=leaves))
    log_p_TV = forward_with_cache(model, ids[11:], layers, start_position=11).log_softmax(-1)
    gradient_SF = torch.autograd.grad(log_p_TV[0, 31], leaves[1])[0].double()
    size = model.spec.head_dim
    direction_D = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for head in range(model.spec.num_kv_heads):
        expected = (gradient_SF[:, head * size : (head + 1) * size] @ direction_D).square().mean()
        found = direction_D @ fisher.sum_L2HDD[1, 1, head] @ direction_D
        # float32 gradients of two orders of summation
        assert float(found) == pytest.approx(float(expected), rel=1e-3)


def test_weights_of_a_group_are_those_of_its_layers_side_by_side(model):
    fisher = FisherWeights(model, seed=0)
    fisher.update(_ids(12), scored_tokens=4)
    elements, heads = fisher.weights(), fisher.weights(of_heads=True)
    assert torch.equal(elements.of_group(0, 2, 1), elements.elements_L2F[:, 1].flatten())
    group_OO = heads.of_group(0, 2, 1)
    assert torch.equal(group_OO.diagonal(), elements.of_group(0, 2, 1))
    size, kv_dim = model.spec.head_dim, model.spec.kv_dim
    assert torch.equal(group_OO[kv_dim : kv_dim + size, kv_dim : kv_dim + size], heads.heads_L2HDD[1, 1, 0])
    assert not bool(group_OO[:size, size:].any())
    assert float(torch.linalg.eigvalsh(group_OO).min()) > 0
    assert torch.equal(ErrorWeights.equal(2, kv_dim).of_group(0, 2, 0), torch.ones(2 * kv_dim, dtype=torch.float64))


def test_one_rotation_is_another_weight_than_none(stretched):
    """The formula above could not tell a rotated gradient from one that was not, if both gave the same."""
    ids, labels_T = _ids(14), torch.tensor([7, 200, 31])
    fisher = Chosen(stretched, seed=0)
    fisher.choose(labels_T, torch.ones(3))
    fisher.update(ids, scored_tokens=3)
    traced = trace(stretched, ids[:11], capture={"kv"})
    layers = [(k.requires_grad_(), v) for k, v in cache_layers(stretched, traced)]
    log_p_TV = forward_with_cache(stretched, ids[11:], layers, start_position=11).log_softmax(-1)
    score = log_p_TV[torch.arange(3), labels_T].sum()
    (rotated_THD,) = torch.autograd.grad(score, [layers[0][0]])
    after_F = rotated_THD.flatten(1).double().square().mean(0)
    scaling = stretched.ropes[0].attention_scaling
    assert scaling > 1.1
    assert float((fisher.sum_L2F[0, 0] / after_F - 1).abs().max()) > 0.05
    # a rotation keeps the size, the scaling multiplies it
    assert float(fisher.sum_L2F[0, 0].sum() / after_F.sum()) == pytest.approx(scaling**2, rel=1e-4)  # float32 gradients


def test_drawn_labels_average_to_the_expectation_under_the_model(tmp_path):
    # larger weights: a peaked prediction, so that labels drawn from another distribution would show
    model = load_model(save_tiny_model(tmp_path / "b", num_hidden_layers=2, initializer_range=0.4))
    ids, num_prefix, num_draws = _ids(7), 6, 400
    with torch.no_grad():
        layers = cache_layers(model, trace(model, ids[:num_prefix], capture={"kv"}))
        p_V = forward_with_cache(model, ids[num_prefix:], layers, start_position=num_prefix).softmax(-1)[0].double()
    of_label_V = torch.stack(
        [_squared_gradients(model, ids, num_prefix, label[None]).mean(2).sum() for label in torch.arange(len(p_V))]
    )
    fisher = FisherWeights(model, seed=5)
    drawn = []
    for _ in range(num_draws):
        before = float(fisher.sum_L2F.sum())
        fisher.update(ids, scored_tokens=1)
        drawn.append(float(fisher.sum_L2F.sum()) - before)
    expected = float(p_V @ of_label_V)
    deviation = float((p_V @ of_label_V.square() - expected**2).sqrt())
    # a mean of independent draws: four standard errors
    bound = 4 * deviation / num_draws**0.5
    assert abs(sum(drawn) / num_draws - expected) < bound
    # the bound would notice labels that are drawn uniformly
    assert abs(float(of_label_V.mean()) - expected) > 2 * bound


def test_weights_are_per_scored_token_and_average_over_prefixes(model):
    """Twice the same text changes nothing; the order of texts neither."""
    one, two = _ids(20), _ids(30, seed=1)
    labels_T, signs_T = torch.tensor([5, 6]), torch.tensor([1.0, -1.0])

    def weights(*texts):
        fisher = Chosen(model, seed=0)
        fisher.choose(labels_T, signs_T)
        for ids in texts:
            fisher.update(ids, scored_tokens=2)
        return fisher.weights().elements_L2F

    assert torch.equal(weights(one, one), weights(one))
    torch.testing.assert_close(
        weights(one, two), weights(two, one), rtol=1e-12, atol=0
    )  # one rounding of a float64 sum
    torch.testing.assert_close(weights(one, two), (weights(one) + weights(two)) / 2, rtol=1e-12, atol=0)


def test_equal_seeds_give_equal_bits_and_others_do_not(model):
    def weights(seed):
        fisher = FisherWeights(model, seed=seed)
        fisher.update(_ids(24), scored_tokens=8)
        fisher.update(_ids(24, seed=1), scored_tokens=8)
        return fisher.weights().elements_L2F

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_elements_that_were_never_touched_keep_a_share_of_their_layer(model):
    fisher = FisherWeights(model, seed=0)
    fisher.update(_ids(12), scored_tokens=4)
    fisher.sum_L2HDD[:] = 0.0
    fisher.sum_L2HDD[1, 0, 0, 3, 3] = 64.0
    weights = fisher.weights().elements_L2F
    mean = 64.0 / 4 / model.spec.kv_dim
    assert float(weights[1, 0, 0]) == pytest.approx(SHRINKAGE * mean, rel=1e-12)
    assert float(weights[1, 0, 3]) == pytest.approx((1 - SHRINKAGE) * 16.0 + SHRINKAGE * mean, rel=1e-12)
    assert bool((weights > 0).all())  # a layer that was never touched at all can still be divided by


@pytest.mark.parametrize("scored_tokens", [0, 10, 11])
def test_no_prefix_or_nothing_to_score_is_refused(model, scored_tokens):
    with pytest.raises(ValueError, match=rf"10 tokens cannot be split into a prefix and {scored_tokens} scored"):
        FisherWeights(model, seed=0).update(_ids(10), scored_tokens=scored_tokens)


def test_nothing_folded_in_has_no_weights(model):
    with pytest.raises(ValueError, match="no sequence was folded in"):
        FisherWeights(model, seed=0).weights()


def test_sinks_have_no_say(model):
    ids = _ids(24)
    every, without = FisherWeights(model, seed=0), FisherWeights(model, seed=0, num_sink_tokens=6)
    every.update(ids, scored_tokens=8)
    without.update(ids, scored_tokens=8)
    assert not torch.allclose(every.sum_L2F, without.sum_L2F, rtol=1e-3)
    # sums over 16 tokens less those over 10 leave the six sinks' own, which cannot be negative
    sinks_L2F = 16 * every.sum_L2F - 10 * without.sum_L2F
    assert bool((sinks_L2F >= -1e-12 * every.sum_L2F).all())
    assert float(sinks_L2F.sum()) > 0
    with pytest.raises(ValueError, match="6 are sinks"):
        without.update(ids[:14], scored_tokens=8)
