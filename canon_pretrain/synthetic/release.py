"""Tasks as the author's release generates them: `release = true` in `[data.task]`.

The release is facebookresearch/PhysicsLM4, folder data-synthetic-pretrain. Where it differs from
the paper, these classes follow the release, and their ids are the release's; ERRATA.md lists the
differences. They are classes of their own, so that the settings of all other runs stay as they are.
Capo is in `capo_release.py`.

Ids of the release, where they differ: <bos> 9999. Depo: <ans> 9500, <query_k> 9000 + k. Brevo:
<query> 9997, <ans> and <eos> both 9998. Mano: <bos> also 9998, value v 5000 + v, + - * 1 2 3 or
5 6 7, <len_l> 10 l or 10 l + 1, <ans> behind l operators 10 l + 4 or 10 l + 5.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from canon_pretrain.synthetic.brevo import Brevo1, Brevo2
from canon_pretrain.synthetic.depo import Depo1, Depo2
from canon_pretrain.synthetic.lano import Lano
from canon_pretrain.synthetic.mano import OPERATORS, Mano
from canon_pretrain.synthetic.task import Instances, Judgement

BOS = 9999
MOST_OPERATORS = 499
MOST_VALUES = 4998
"""Of Mano: marks of lengths are below 5000, values below 9998."""


class _DepoIds:
    """The release's ids of Depo."""

    most_hops: ClassVar[int] = 499
    """<query_500> would be <ans>."""

    @property
    def _bos(self) -> int:
        return BOS

    @property
    def _ans(self) -> int:
        return 9500

    @property
    def _query_0(self) -> int:
        return 9000


@dataclass(frozen=True, kw_only=True)
class ReleasedDepo1(_DepoIds, Depo1):
    """Depo1 of the release, which differs in ids only."""

    fixed: ClassVar[Sequence[str]] = ("release", "n_weight")
    release: bool = True
    """Depo, Brevo, Capo, Mano, Lano: as the author's released generator, quirks and ids."""


@dataclass(frozen=True, kw_only=True)
class ReleasedDepo2(_DepoIds, Depo2):
    """Depo2 of the release: a vocabulary of 3."""

    fixed: ClassVar[Sequence[str]] = ("release", "n_weight", "vocab")
    release: bool = True
    vocab: int = 3


class _BrevoQuirks:
    """What both kinds of Brevo have in the release: its ids, leaves, and answers."""

    answers_query: ClassVar[bool] = True
    fixed: ClassVar[Sequence[str]] = ("release", "n_weight", "last_query")

    @property
    def _marks(self) -> Sequence[int]:
        query = BOS - 2
        ans = BOS - 1
        return (BOS, query, ans, ans)

    def _most_leaves(self, n: np.ndarray) -> np.ndarray:
        return 1 + (n - 1) // 4


@dataclass(frozen=True, kw_only=True)
class ReleasedBrevo1(_BrevoQuirks, Brevo1):
    """Brevo1 of the release."""

    release: bool = True
    last_query: bool = True


@dataclass(frozen=True, kw_only=True)
class ReleasedBrevo2(_BrevoQuirks, Brevo2):
    """Brevo2 of the release."""

    release: bool = True
    last_query: bool = True

    def _draw_names(
        self, random_bits: np.ndarray, n: np.ndarray, instance: np.ndarray, ends: np.ndarray
    ) -> np.ndarray:
        # The release draws names for vertices with edges only. As names that are drawn early are
        # shorter on average, it matters how many are drawn.
        has_edge = np.zeros((len(n), self.n), bool)
        has_edge[instance, ends] = True
        drawn = self._names.draw(random_bits, has_edge.sum(axis=1))
        names = np.zeros_like(drawn)
        names[has_edge] = drawn[drawn > 0]
        return names


@dataclass(frozen=True, kw_only=True)
class ReleasedMano(Mano):
    """Mano of the release: two ids per mark, and an <ans> for each length."""

    fixed: ClassVar[Sequence[str]] = ("release", "synonyms")
    release: bool = True
    synonyms: bool = True

    def check(self) -> None:
        super().check()
        # so that ids are distinct
        if self.l > MOST_OPERATORS:
            self.refuse("l", self.l, f"at most {MOST_OPERATORS} with release = true")
        if self.modulus > MOST_VALUES:
            self.refuse("modulus", self.modulus, f"at most {MOST_VALUES} with release = true")

    @functools.cached_property
    def _released(self) -> np.ndarray:
        """The release's id of each id of mano.py, in the order: 0, values, marks, synonyms. <ans>
        has base 4 or 5; `build` adds 10 l."""
        lengths = 10 * np.arange(1, self.l + 1)
        values = 5000 + np.arange(self.modulus)
        marks = [*range(1, 1 + len(OPERATORS)), BOS, 4, *lengths]
        synonyms = [*range(5, 5 + len(OPERATORS)), BOS - 1, 5, *(lengths + 1)]
        return np.array([0, *values, *marks, *synonyms])

    @functools.cached_property
    def _words(self) -> dict[int, tuple[int, str]]:
        """mano.py's id, without synonyms, and the text of each id of the release."""
        words = {}
        for number, token in enumerate(self._released[1:].tolist(), 1):
            text = super().word(number)
            is_synonym = number > self.modulus + self._num_marks
            plain = number - self._num_marks if is_synonym else number
            if plain == self._ans:
                for length in range(1, self.l + 1):
                    words[token + 10 * length] = (plain, text.replace("ans", f"ans_{length}"))
            else:
                words[token] = (plain, text)
        return words

    def _plain(self, ids: Sequence[int]) -> list[int]:
        """Return ids of mano.py without synonyms; 0 for an id that the release has not."""
        return [self._words[token][0] if token in self._words else 0 for token in ids]

    @property
    def vocab_size(self) -> int:
        return BOS + 1

    def word(self, token: int) -> str:
        return self._words[token][1] if token in self._words else str(token)

    def build(self, random_bits: np.ndarray, seed: int) -> Instances:
        instances = super().build(random_bits, seed)
        ids = self._released[instances.ids]

        # The second token of an instance is 10 l or 10 l + 1, the last but one is <ans>.
        ends = instances.ends
        starts = np.append(0, ends[:-1])
        ids[ends - 2] += ids[starts + 1] // 10 * 10
        return instances._replace(ids=ids)

    def judge(self, prompt: Sequence[int], answer: Sequence[int]) -> Judgement:
        return super().judge(prompt, self._plain(answer))

    def _solve(self, prompt: Sequence[int]) -> tuple[int, int]:
        length, value = super()._solve(self._plain(prompt))
        if prompt[-1] // 10 != length:
            self.bad_prompt("an expression of l operators and the <ans> of this length")
        return length, value


@dataclass(frozen=True, kw_only=True)
class ReleasedLano(Lano):
    """Lano of the release, which has the paper's rules and these ids."""

    fixed: ClassVar[Sequence[str]] = ("release",)
    release: bool = True
