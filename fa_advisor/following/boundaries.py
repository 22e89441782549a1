"""Where a script's steps begin and end, from what it does: nobody tells."""

from __future__ import annotations

from collections.abc import Callable

from fa_advisor.following.schedule import Kind

# So many forwards that make a graph, none of which has a backward, are an inference's.
_GRAPHS = 3
# So many backwards without an optimizer's step are no accumulation: gradients are all that is
# wanted.
_BACKWARDS = 1_024


class Boundaries:
    """A training's step ends with an optimizer's; where the script moves its parameters by hand, or
    none, when a forward follows on a backward. An inference's step is a forward.

    `an_optimizer_lives` is asked seldom: it may take long.
    """

    def __init__(self, an_optimizer_lives: Callable[[], bool]) -> None:
        self.done: dict[Kind, int] = {"train": 0, "infer": 0}
        self.between = True  # two steps; else in the middle of one
        self.training = False  # a graph has been begun since the last step ended
        self._an_optimizer_lives = an_optimizer_lives
        self._by_hand: bool | None = None
        self._stepped = False
        self._gradients = 0
        self._backwards = 0  # since an optimizer stepped
        self._graphs = 0

    def by_hand(self, gradients: int, *, unseen: bool = False) -> bool:
        """A forward begins: whether a step ended before it that no optimizer has ended.

        `gradients`: how many have been accumulated so far. `unseen`: nobody counts them now, and
        this forward makes a graph.
        """
        came, self._gradients = gradients > self._gradients, gradients
        if unseen and self._by_hand and not self._stepped:
            return not self.between  # one forward a backward, as far as anybody knows
        if not came:
            return False
        self._backwards += 1
        if self._backwards > _BACKWARDS:
            return True
        if self._stepped:
            return False
        if self._by_hand is None:
            self._by_hand = not self._an_optimizer_lives()
        return self._by_hand

    def begins(self, *, graph: bool, trained: bool) -> Kind:
        """A forward begins; of which kind the step is that it belongs to.

        `graph`: gradients are enabled. `trained`: there has been a backward.
        """
        graph = graph and (trained or self._graphs < _GRAPHS)
        self.between = False
        self.training = self.training or graph
        return "train" if self.training else "infer"

    def forward_ends(self, *, graph: bool, trained: bool) -> bool:
        """Whether an inference's step has ended with this forward."""
        if graph and not trained:
            self._graphs += 1
            if self._graphs >= _GRAPHS:  # it infers, and doesn't mind that graphs are made
                self.training = False
        return not self.training

    def optimizer_stepped(self, surplus: int = 0) -> None:
        """From now on optimizers say where steps end. `surplus`: so many were no ends after all."""
        self._stepped = True
        self._backwards = 0
        self.done["train"] -= surplus

    def ended(self, kind: Kind) -> None:
        """A step has."""
        self.between, self.training = True, False
        self.done[kind] += 1

    def over(self, kind: Kind, limit: int) -> bool:
        """Whether so many steps have been: of the training, where there is one."""
        if self.done[kind] < limit:
            return False
        # Forwards before a training's first step, as Lightning's sanity check, are no steps of it.
        return kind == "train" or not (self.done["train"] or self._an_optimizer_lives())
