"""Compare settings of tost: plans, the program that runs them, stored results and the pages made from these."""
