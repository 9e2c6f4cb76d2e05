"""The degradation ladder: when rungs go on and off, and which ladders are refused."""

import pytest

from sim.core import ConfigError
from sim.core.rungs import LadderConfig, Rung, check_ladder, standard_ladder
from tests.support.laddered_engine import LadderedEngine

# -- triggers ----------------------------------------------------------------------------------------------------------


def test_a_rung_goes_on_at_its_threshold_and_off_below_the_lower_one():
    """Pool of 20, on at 50 %, off below 30 %: a prompt of 40 tokens takes 10 blocks in step 0, so step 1 sees 50 %; the request
    ends after 2 steps, and step 2 sees only the 4 blocks (20 %) of the other one."""
    engine = LadderedEngine(Rung(action="no_reuse", on=0.5, off=0.3, hold_s=0.0))
    engine.add("big", 40, 2)
    engine.step()
    engine.add("small", 13, 4)
    engine.run()
    assert engine.ladder_log() == [(1, "no_reuse", "on"), (2, "no_reuse", "off")]


def test_a_rung_stays_on_for_its_hold_time():
    engine = LadderedEngine(Rung(action="no_reuse", on=0.5, off=0.3, hold_s=5.0))
    engine.add("big", 40, 2)
    engine.step()
    engine.add("small", 4, 10)
    engine.run()
    assert engine.ladder_log() == [(1, "no_reuse", "on"), (6, "no_reuse", "off")]


def test_a_harder_rung_goes_on_only_after_the_milder_ones_of_its_signal():
    """Both are due in step 1 and go on in order; with the milder one's threshold out of reach the harder one never does."""
    mild = Rung(action="no_reuse", on=0.5, off=0.3)
    hard = Rung(action="pause_admission", on=0.5, off=0.3)
    engine = LadderedEngine(mild, hard)
    engine.add("big", 40, 3)
    engine.step()
    engine.step()
    assert engine.ladder_log() == [(1, "no_reuse", "on"), (1, "pause_admission", "on")]
    never = LadderedEngine(Rung(action="no_reuse", on=1.1, off=1.1), hard)
    never.add("big", 40, 3)
    never.run()
    assert never.ladder_log() == []


# -- whom it spares, and what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rung", "words"),
    [
        ({"action": "sleep", "on": 1, "off": 0}, "known are drop_cache"),
        ({"action": "shed", "signal": "mood", "on": 1, "off": 0}, "known are kv_usage"),
        ({"action": "shed", "on": 0.5, "off": 0.9}, "flutter"),
        ({"action": "truncate", "on": 0.9, "off": 0.5}, "needs a value above 0"),
    ],
)
def test_a_rung_that_makes_no_sense_is_refused(rung, words):
    with pytest.raises(ConfigError, match=words):
        Rung(**rung)


def test_a_ladder_that_the_engine_cannot_carry_out_is_refused():
    swap_out = Rung(action="swap_out", on=0.9, off=0.5, value=0.5)
    with pytest.raises(ConfigError, match="no CPU pool"):
        check_ladder(LadderConfig(rungs=(swap_out,)), swap=False)
    with pytest.raises(ConfigError, match="no CPU prefix tier"):
        check_ladder(LadderConfig(rungs=(Rung(action="offload_cache", on=0.9, off=0.5),)), swap=True)
    with pytest.raises(ConfigError, match="no CPU executor"):
        check_ladder(LadderConfig(rungs=(Rung(action="run_on_cpu", on=0.9, off=0.5, value=0.5),)), swap=True)
    with pytest.raises(ConfigError, match="twice"):
        check_ladder(LadderConfig(rungs=(swap_out, swap_out)), swap=True)


# -- random ladders ----------------------------------------------------------------------------------------------------


def test_the_standard_ladder_scales_with_the_objective():
    assert [rung.on for rung in standard_ladder(4.0).rungs[1:]] == [1.0, 2.8]
