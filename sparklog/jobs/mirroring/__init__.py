"""The parts of the job `mirror`: both sides, the plan of a round, rounds, verification, cutover."""
