"""How many drafted tokens the target accepts: counts and intervals; replay, decode, served."""
