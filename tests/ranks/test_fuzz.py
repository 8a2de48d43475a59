"""Some random programs on two ranks: each comes to what one process with the batches of both comes to."""

from fuzzing import describe
from fuzzing.drawing import draw_rank_program
from fuzzing.on_ranks import run_programs

SEEDS = 100


def test_random_programs_on_ranks(tmp_path):
    complaints = run_programs(range(SEEDS), tmp_path)
    told = [f"seed {seed}: {said}\n{describe(draw_rank_program(seed))}" for seed, said in complaints.items()]
    assert not told, "\n".join(told)
