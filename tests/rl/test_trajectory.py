"""Trajectories of one and of several turns: what aligns with what, and advantages over what was not sampled."""

from __future__ import annotations

def test_arrays_are_cut_to_each_sequence() -> None:
    examples = [Example((Sequence((5,) * n, (False,) + (True,) * (n - 1), "row"),)) for n in (2, 3)]
    made = with_arrays(examples, a=torch.arange(6.0).view(2, 3))
    assert [dict(e.sequences[0].arrays) for e in made] == [{"a": (0.0, 1.0)}, {"a": (3.0, 4.0, 5.0)}]
