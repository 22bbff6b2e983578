"""The deal: every image once an epoch, whoever asks when, dies, joins or resumes; and units that end together."""

import json
from collections import Counter
from heapq import heappop, heappush
from random import Random

import pytest

from polyrhythm.data.dealer import Dealer, Deck, Grant, merged
from polyrhythm.data.dealing import images_dealt

SEEDS = 1000


class Players:
    """Units that take batches at their own speeds, as an event queue without any of the project's loops.

    Attributes:
        done: how often each image of each epoch was counted.
        ended_s: when each unit found nothing left to do.
        asked: grants that were made.
        sizes: of all counted batches.
    """

    def __init__(self, deck, sizes, step_s, seed=0, deaths=0.0, resumes=0.0):
        self.deck, self.sizes, self.step_s = deck, sizes, step_s
        self.random, self.deaths, self.resumes = Random(seed), deaths, resumes
        self.dealer = Dealer(deck, sizes)
        self.counted = [0] * len(sizes)
        self.alive = [True] * len(sizes)
        self.done = Counter()
        self.generations = Counter()
        self.ended_s = {}
        self.asked = 0
        self.batch_sizes = []
        self.queue = []

    def play(self):
        for unit in range(len(self.sizes)):
            self.begin(unit, 0.0)
        while self.queue:
            now_s, _, unit, generation, batch = heappop(self.queue)
            if generation != self.generations[unit]:
                continue
            if batch is None:  # a successor goes on with what counts
                self.alive[unit] = True
                self.begin(unit, now_s)
                continue
            if self.random.random() < self.deaths and sum(self.alive) > 1:
                self.die(unit, now_s)
                continue
            self.counted[unit] += 1
            self.batch_sizes.append(batch.stop - batch.start)
            self.done.update((batch.epoch, place) for place in range(batch.start, batch.stop))
            if self.random.random() < self.resumes:
                self.resume(now_s)
            else:
                self.begin(unit, now_s)

    def begin(self, unit, now_s):
        step = self.counted[unit]
        before = len(self.dealer.grants[unit])
        grant = self.dealer.draw(unit, step, now_s)
        if not grant.batches:
            self.ended_s[unit] = now_s
            return
        if step == grant.end - 1:  # asks early: when it begins the last batch that it has
            self.dealer.draw(unit, step + 1, now_s)
        self.asked += len(self.dealer.grants[unit]) > before
        batch = grant.batch(step)
        seconds = self.step_s(unit) * (batch.stop - batch.start)
        self.push(now_s + seconds, unit, batch)

    def die(self, unit, now_s):
        self.alive[unit] = False
        self.generations[unit] += 1
        self.dealer.return_batches(unit, self.counted[unit])
        assert self.dealer.steps_of(unit).stop == self.counted[unit]
        if self.random.random() < 0.7:
            self.push(now_s + self.random.random(), unit, None)
        for other in list(self.ended_s):  # it had found nothing left to do, and there is something again
            del self.ended_s[other]
            self.begin(other, now_s)

    def resume(self, now_s):
        told = json.loads(json.dumps(self.dealer.to_json()))
        self.dealer = Dealer.from_json(self.deck, self.sizes, told)
        self.queue.clear()
        for unit in range(len(self.sizes)):
            self.alive[unit] = True
            self.begin(unit, now_s)

    def push(self, at_s, unit, batch):
        heappush(
            self.queue, (at_s, len(self.queue) + self.random.random(), unit, self.generations[unit], batch)
        )


@pytest.mark.parametrize("part", range(4))
def test_every_image_is_counted_once_an_epoch_whoever_asks_dies_joins_or_resumes(part):
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):
        random = Random(seed)
        epochs = random.randint(1, 4)
        deck = Deck(
            tuple(random.randint(1, 90) for _ in range(epochs)),
            tuple(random.randint(1, 8) for _ in range(epochs)),
        )
        sizes = [random.randint(1, 3) for _ in range(random.randint(1, 5))]
        speeds = [random.choice([0.01, 0.01, 0.05, 0.2]) for _ in sizes]
        players = Players(
            deck,
            sizes,
            lambda unit, random=random, speeds=speeds: speeds[unit] * random.uniform(0.5, 2),
            seed=seed,
            deaths=random.choice([0, 0.05, 0.2]),
            resumes=random.choice([0, 0.03]),
        )
        players.play()
        everything = {
            (epoch, place): 1 for epoch, images in enumerate(deck.images) for place in range(images)
        }
        assert players.done == everything, f"seed {seed}"
        assert players.dealer.undealt == 0
        assert not any(players.dealer.left(players.counted).values())


def test_uneven_units_end_together_with_few_messages():
    # 400 batches, speeds 1, 1, 1 and 0.2: 125 s are ideal, fixed shares take 500 s, and chunks of R/N 210 s.
    players = Players(Deck((25600,), (64,)), [1] * 4, lambda unit: (5 if unit == 3 else 1) / 64)
    players.play()
    assert max(players.ended_s.values()) <= 125 + 5
    assert players.asked <= 60
    assert set(players.batch_sizes) == {64}


@pytest.mark.parametrize("seed", range(20))
def test_units_of_any_speeds_end_within_a_batch_of_the_slowest(seed):
    random = Random(seed)
    seconds = [random.uniform(0.2, 4) for _ in range(random.randint(2, 12))]
    images = 3000 * len(seconds)
    players = Players(Deck((images,), (10,)), [1] * len(seconds), lambda unit: seconds[unit] / 10)
    players.play()
    ideal_s = images / 10 / sum(1 / each for each in seconds)
    assert max(players.ended_s.values()) <= ideal_s + 1.5 * max(seconds)


@pytest.mark.parametrize(("images", "size"), [(130, 64), (1001, 100), (64, 64), (65, 64), (7, 10), (938, 31)])
def test_batches_differ_by_one_image_at_most_and_are_as_few_as_can_be(images, size):
    players = Players(Deck((images, images), (size, size)), [1] * 3, lambda unit: 1 + unit)
    players.play()
    batches = -(-images // size)
    assert len(players.batch_sizes) == 2 * batches
    assert set(players.batch_sizes) <= {images // batches, -(-images // batches)}
    assert max(players.batch_sizes) <= size


def test_a_group_takes_batches_of_all_its_members_together():
    players = Players(Deck((1200,), (10,)), [3, 1], lambda unit: [1 / 30, 1 / 10][unit])
    players.play()
    taken = [sum(grant.images for grant in grants) for grants in players.dealer.grants]
    assert taken[0] == pytest.approx(900, abs=40)


def test_asking_again_gets_the_same_batches_again():
    dealer = Dealer(Deck((1000,), (10,)), [1, 1])
    first = dealer.draw(0, 0, 0.0)
    for step in range(1, 20):
        dealer.draw(0, step, float(step))
    assert dealer.draw(0, 0, 99.0) == first
    assert [dealer.draw(0, step, 99.0).batch(step) for step in range(20)] == [
        dealer.draw(0, step, 100.0).batch(step) for step in range(20)
    ]


def test_another_owner_that_hears_of_all_grants_goes_on_where_the_first_was():
    deck = Deck((500, 500), (7, 7))
    one, other = Dealer(deck, [1, 1, 1]), Dealer(deck, [1, 1, 1])
    random, steps = Random(1), [0, 0, 0]
    for now_s in range(40):
        unit = random.randrange(3)
        grant = one.draw(unit, steps[unit], float(now_s))
        other.note(unit, grant)
        steps[unit] = grant.end
        if now_s == 20:
            for given in one.return_batches(1, steps[1] - 1):
                other.note(1, given)
            steps[1] -= 1
            other.note(1, one.draw(1, steps[1], 20.5))
            steps[1] = one.steps_of(1).stop
    assert other.undealt == one.undealt
    assert other.left(steps) == one.left(steps)


def test_a_successor_that_counts_its_steps_anew_gets_batches_that_nobody_had():
    deck = Deck((100,), (10,))
    one, other = Dealer(deck, [1, 1]), Dealer(deck, [1, 1])
    for step in range(3):
        other.note(0, one.draw(0, step, float(step)))
    left = one.undealt
    one.draw(0, 7, 4.0)  # more of it counts than was known
    other.note(0, one.grants[0][-1])
    for given in one.return_former(0, 4) + one.return_batches(0, 7):
        other.note(0, given)
    anew = one.draw(0, 0, 5.0)
    other.note(0, anew)
    assert (anew.step, anew.start) == (0, 100 - left)
    assert one.draw(0, 0, 6.0) == anew
    assert one.undealt == other.undealt == left - anew.images
    assert one.left([0, 0]) == other.left([0, 0]) == {0: [(100 - left, 100)]}


def test_what_is_done_stays_done_where_a_successor_counts_otherwise_and_finds_nothing_left():
    deck = Deck((40,), (10,))
    one, other = (Dealer(deck, [1], steps=[2]) for _ in range(2))
    step = 2
    while (grant := one.draw(0, step, float(step))).batches:
        other.note(0, grant)
        step = grant.end
    assert one.return_batches(0, 6) == []  # all of it counts
    assert not one.draw(0, 1, 9.0).batches
    other.note(0, Grant(1, 0, 0, 0, 0))
    assert one.return_batches(0, 6) == []
    assert (one.undealt, other.undealt) == (0, 0)
    assert one.steps_of(0) == other.steps_of(0) == range(1, 1)
    assert one.left([1]) == other.left([1]) == {0: []}


def test_what_a_predecessor_had_not_done_is_given_back_whenever_its_loss_is_told():
    deck = Deck((80,), (10,))
    one, other = Dealer(deck, [1], steps=[5]), Dealer(deck, [1], steps=[5])
    for step in (5, 6, 7):
        other.note(0, one.draw(0, step, float(step)))
    held = one.steps_of(0)
    anew = one.draw(0, 3, 9.0)  # asked for before the loss is heard of, by who knows of fewer steps
    other.note(0, anew)
    undealt = one.undealt
    given = one.return_former(0, 6)
    for each in given:
        other.note(0, each)
    assert sum(each.images for each in given) == 10 * (held.stop - 6) == one.undealt - undealt
    assert one.undealt == other.undealt
    assert one.grants == other.grants == [[anew]]
    assert one.left([anew.end]) == other.left([anew.end])


def test_a_script_is_granted_in_place_of_a_decision():
    deck = Deck((300,), (10,))
    players = Players(deck, [1, 1], lambda unit: [1.0, 0.3][unit])
    players.play()
    again = Players(deck, [1, 1], lambda unit: 1.0)
    again.dealer.follow(players.dealer.grants)
    again.play()
    assert again.dealer.grants == players.dealer.grants


def test_a_budget_of_updates_ends_the_run_within_an_epoch():
    images = images_dealt(1000, (10, 10), steps=137)
    players = Players(Deck(images, (10, 10)), [1] * 3, lambda unit: 1 + unit)
    players.play()
    assert len(players.batch_sizes) == 137
    assert set(players.batch_sizes) == {10}


def test_what_others_left_of_an_epoch_is_dealt():
    dealer = Dealer(Deck((100, 100), (10, 10)), [1], steps=[4], begun={0: [(20, 30), (95, 100)]})
    assert dealer.undealt == 115
    step, places = 4, []
    while (grant := dealer.draw(0, step, float(step))).batches:
        places += [(grant.epoch, place) for place in range(grant.start, grant.stop)]
        step = grant.end
    assert places[:15] == [(0, place) for place in [*range(20, 30), *range(95, 100)]]
    assert len(places) == len(set(places)) == 115


def test_what_the_run_has_reached_follows_time_for_fast_and_slow_units_alike():
    deck, told = Deck((25600, 25600), (64, 64)), []
    players = Players(deck, [1] * 4, lambda unit: (5 if unit == 3 else 1) / 64)
    draw = players.dealer.draw

    def noted(unit, step, now_s):
        grant = draw(unit, step, now_s)
        if grant.batches and step == grant.step:
            told.append((now_s, grant.reached))
        return grant

    players.dealer.draw = noted
    players.play()
    assert told[0] == (0.0, 0)
    end_s = max(players.ended_s.values())
    for now_s, reached in told:  # asked for one batch early, which the slow one takes 5 s for
        assert reached / 51200 == pytest.approx(now_s / end_s, abs=0.04)
    for grants in players.dealer.grants:
        assert all(a.reached < a.until <= 51200 for a in grants)


def test_progress_is_the_place_of_the_batch_in_the_run():
    dealer = Dealer(Deck((100, 100), (10, 10)), [1, 1])
    dealer.draw(0, 0, 0.0)
    dealer.draw(1, 0, 0.0)
    dealer.draw(0, 1, 0.0)
    assert dealer.progress_of(0, 0) == (0, 0)
    assert dealer.progress_of(1, 0) == (0, 10)
    assert dealer.progress_of(0, 1) == (0, 20)
    assert dealer.progress_of(0, 2) == (0, 30)


def test_a_grant_splits_evenly():
    grant = Grant(5, 2, 10, 30, 3)
    assert [grant.batch(step)[1:3] for step in (5, 6, 7)] == [(10, 16), (16, 23), (23, 30)]
    assert grant.before(7) == Grant(5, 2, 10, 23, 2)


def test_ranges_that_touch_become_one():
    assert merged([(5, 7), (0, 2), (2, 4), (9, 9), (6, 8)]) == [(0, 4), (5, 8)]


@pytest.mark.parametrize("epochs", [2, 5])
def test_a_deal_that_is_resumed_with_other_epochs_deals_each_of_them_once(epochs):
    dealer, done = Dealer(Deck((20,) * 3, (4,) * 3), [1, 1]), Counter()
    steps = [0, 0]
    for unit in (0, 1, 0, 1, 0):  # less than two epochs
        grant = dealer.draw(unit, steps[unit], 0.0)
        steps[unit] = grant.end
        done.update((grant.epoch, place) for place in range(grant.start, grant.stop))
    assert max(epoch for epoch, _ in done) < 2
    told = json.loads(json.dumps(dealer.to_json()))
    resumed = Dealer.from_json(Deck((20,) * epochs, (4,) * epochs), [1, 1], told)
    while (grant := resumed.draw(0, steps[0], 0.0)).batches:
        steps[0] = grant.end
        done.update((grant.epoch, place) for place in range(grant.start, grant.stop))
    assert done == Counter((epoch, place) for epoch in range(epochs) for place in range(20))
