"""The numbers that decide something in a search. ``docs/search.md`` has a table of them, which a test compares with
this module.
"""

from __future__ import annotations

STAGES = {
    "cost table": 0.16,
    "screening": 0.14,
    "traces": 0.2,
    "tree search": 0.06,
    "finalists": 0.2,
    "evaluation": 0.24,
}  # share of the budget of each stage
MAX_SCREENING_SHARE = 0.6  # largest share of the budget for screening, in spaces with thousands of subnets
ANSWERS_SHARE = 0.7  # share of the time for traces in which the target's answers are decoded
MIN_TUNE_PROMPTS = 12  # answers are shortened until this number of tuning prompts fits into the budget
LEAST_TOKENS = 16  # answers are not shortened below this number of tokens
# held-out prompts, finalists' prompts, finalists and published defaults whose time is kept: the first that fit;
# where subnets are screened, of those with as many finalists and defaults as the last
KEPT_PROMPTS = ((16, 8, 2, 2), (16, 8, 2, 1), (16, 8, 1, 1), (8, 4, 2, 2))
RATE_TOKENS = 6  # tokens that are decoded to measure the target's speed
RATE_RUNS = 2  # times that they are decoded
TABLE_STEPS = 90  # plain steps that the smallest cost table takes for the target
TABLE_STEPS_OF_DRAFT = 30  # the same for each draft
FULL_TABLE = 8  # times the smallest cost table, the table that nothing cuts
TRACE_STEPS = 1.0  # plain steps that a draft's proposals at one position of an answer take
SCREENING_STEPS = 0.18  # the same for a chain in screening
FULL_FINALIST_RUNS = 416  # runs in the race of finalists that nothing cuts: 13 arms on 32 prompts
EVALUATED_ARMS = 4  # plain decoding, the profile, the best default and Hugging Face
KEPT_TOKENS = 100  # tokens below which answers are shortened only where no `KEPT_PROMPTS` fit otherwise
KEPT_SHARE = 0.9  # largest share of the budget that is kept for the least of all stages
MIN_TRACED_PROMPTS = 6  # prompts that are recorded past the deadline too, as long as later stages keep their least
MIN_TREE_SEARCH_S = 12.0  # seconds of tree search, even past the deadline
SCREENED_PROMPTS = 8  # prompts on which subnets are screened
SCREENED_TOKENS = 64  # tokens of each of their answers, the same for all subnets
SCREENED_DEPTH = 8  # of the longest chain with which a subnet is screened
FIRST_CHAIN_PROMPTS = 2  # prompts of the cheap chain of each draft, which comes first
FIRST_CHAIN_TOKENS = 16  # tokens of each answer of the cheap chain
MAX_SCREENED_TOGETHER = 8  # subnets in a unit of work
SCREENED_AT_ONCE = 4  # units of each process between two rankings
LEAST_SHARE = 0.75  # share of the fastest chain's speedup below which a draft does not survive screening
NUM_SWEPT = 2048  # trees of each policy and subnet that are swept; a power of two, for Sobol's sequence
SWEEP_SIZE = 256  # trees in a unit of work
NUM_UNIT_TRIALS = 50  # the same of trials of TPE
FIRST_REPLAYED = 3  # one of this number of prompts of each task, two at least, replays all trees of a sweep
NUM_PROMOTED = 64  # trees of a sweep, the fastest on these prompts, that are replayed over all prompts
NUM_KEPT = 24  # fastest trees in the record of a unit; TPE starts from so many of all sweeps
CONFIRMING = 3  # one of this number of tuning prompts of each task confirms; the others choose
MIN_CONFIRMING = 12  # with fewer confirming prompts, one of two confirms
MIN_SPLIT = 12  # with fewer tuning prompts, all of them both choose and confirm
NUM_CONFIRMED = 64  # configurations, the fastest on the choosing prompts, that are ranked again on the confirming ones
NUM_CONFIRMED_OF_KIND = 8  # the same, of each draft and policy
MAX_SIMILAR = 2  # finalists with the same draft and policy
CONFIDENCE = 0.9  # of intervals of predictions; what is slower than the first in this share of draws is no finalist
DECODING_ERROR = 0.08  # relative standard deviation of measured speedups around predictions by exact costs
# prompts between two looks, finalists and published defaults (None: all) of the race: the first that fits, or those
# of `KEPT_PROMPTS`
RACE_SIZES: tuple[tuple[int, int, int | None], ...] = ((8, 6, None), (8, 4, None), (8, 4, 2), (8, 2, 2), (4, 2, 2))
RISK = 0.05  # probability that a race of equally fast arms drops any of them, spent over its looks
MIN_PROMPTS = 4  # prompts of a race that may end past its deadline
MAX_PASSES = 4  # passes over the confirming prompts in the race of finalists
SECOND_RACE_SHARE = 0.3  # share of the time for finalists that is left for configurations that lead with updated prices
MAX_LEADERS = 2  # configurations that run because they lead with updated prices
MAX_MOVED_PRICE = 1.2  # times the fastest one's time, up to which updated prices may let a configuration lead
MAX_TIE = 1.005  # ratio of two estimated speedups up to which the smaller tree wins
MAX_HELD_OUT_DEFAULTS = 3  # published defaults, the fastest on tuning prompts, that run on held-out prompts
HELD_OUT_PROMPTS = 8  # held-out prompts between two looks; `MIN_PROMPTS` where so many take a third of the time
EXAMINATION_SHARE = 0.12  # share of the time for evaluation in which answers that differ are examined
ENGINE_PROMPTS = {"tune": 24, "evaluate": 60}  # largest number of prompts of each split in an engine's search
# shares of an engine's budget after which its plain answers, the prices and the race of finalists end
ENGINE_ENDS = {"answers": 0.3, "prices": 0.5, "finalists": 0.7}
LATE = 1.2  # times the share of the budget after which a stage of an engine's search is said to be late
PROCESS_DIFFERENCE = 0.01  # relative difference in time between two servers of one program that decides nothing
LOADS_SHARE = 0.4  # share of an engine's budget for the depths by load, if loads are given
TUNING_SHARE = 0.8  # share of the budget in which several backends are tuned, equally long; the rest is for their race
