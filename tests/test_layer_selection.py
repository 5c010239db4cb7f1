"""Greedy selection and the budget rule on cases worked by hand."""

import pytest

from scd_trt.distill.layer_selection import (
    LayerSelectionError,
    Step,
    best_layers,
    check_layers,
    configured,
    greedy_path,
    select,
    within_budget,
)

# Worked by hand. Layers 0 and 2 help each other (0.1 and 0.2 alone, 0.9 together); 3 looks best alone but adds nothing later.
GAINS = {
    (0,): 0.10, (1,): 0.05, (2,): 0.20, (3,): 0.30,
    (0, 3): 0.35, (1, 3): 0.36, (2, 3): 0.55,
    (0, 2, 3): 0.96, (1, 2, 3): 0.60,
    (0, 1, 2, 3): 1.00,
}  # fmt: skip
UNIT_COSTS = dict.fromkeys(range(4), 1.0)


def _score(sets):
    return [GAINS[tuple(sorted(layers))] for layers in sets]


def test_greedy_adds_the_layer_with_the_best_joint_gain():
    path = greedy_path((0, 1, 2, 3), _score, costs=UNIT_COSTS, max_layers=4)
    assert [step.layers for step in path] == [(3,), (3, 2), (3, 2, 0), (3, 2, 0, 1)]
    assert [step.gain for step in path] == [0.30, 0.55, 0.96, 1.00]
    assert [step.cost for step in path] == [1.0, 2.0, 3.0, 4.0]


def test_budget_is_the_argmax_of_gain_per_cost():
    # 0.30 / 1, 0.55 / 2, 0.96 / 3, 1.00 / 4: the third is best, though the first step of the path looked good
    selection = select((0, 1, 2, 3), _score, costs=UNIT_COSTS, max_layers=4)
    assert [round(step.efficiency, 4) for step in selection.path] == [0.3, 0.275, 0.32, 0.25]
    assert selection.layers == (0, 2, 3)


def test_costs_decide_where_layers_differ_in_rank():
    # with layer 0 three times as dear: 0.30 / 1, 0.55 / 2, 0.96 / 5
    costs = {**UNIT_COSTS, 0: 3.0}
    selection = select((0, 1, 2, 3), _score, costs=costs, max_layers=4)
    assert selection.layers == (3,)


def test_only_the_best_of_the_profile_are_tried():
    tried = set()

    def score(sets):
        tried.update(layer for layers in sets for layer in layers)
        return _score(sets)

    candidates = best_layers({0: 0.2, 1: 0.9, 2: -0.1, 3: 0.9}, 2)
    select(candidates, score, costs=UNIT_COSTS, max_layers=6)
    assert tried == {1, 3}


def test_ties_go_to_the_lower_layer_and_the_smaller_set():
    assert best_layers({5: 1.0, 2: 1.0, 3: 2.0}, 2) == (3, 2)
    path = greedy_path((2, 1), lambda sets: [1.0] * len(sets), costs=UNIT_COSTS, max_layers=1)
    assert path[0].layers == (1,)
    assert within_budget((Step((4,), 1.0, 1.0), Step((4, 7), 2.0, 2.0))) == (4,)


def test_nothing_is_patched_where_nothing_gains():
    assert within_budget((Step((4,), -0.1, 1.0), Step((4, 7), 0.0, 2.0))) == ()
    assert within_budget(()) == ()
    assert select((0,), _score, costs=UNIT_COSTS, max_layers=0).path == ()


def test_the_path_goes_on_over_a_step_that_gains_nothing():
    path = (Step((4,), -0.1, 1.0), Step((4, 7), 0.5, 2.0))
    assert within_budget(path) == (4, 7)


def test_configured_layers_are_taken_even_where_they_gain_nothing():
    selection = configured((2, 3), lambda sets: [-1.0] * len(sets), costs={2: 1.0, 3: 2.0})
    assert selection.layers == (2, 3)
    assert [(step.layers, step.gain, step.cost) for step in selection.path] == [((2,), -1.0, 1.0), ((2, 3), -1.0, 3.0)]


def test_configured_layers_are_checked():
    assert check_layers((3, 1), 4) == (1, 3)
    with pytest.raises(LayerSelectionError, match=r"layer 4 of a model with layers 0\.\.3"):
        check_layers((1, 4), 4)
    with pytest.raises(LayerSelectionError, match="layer 1 is named twice"):
        check_layers((1, 1), 4)
