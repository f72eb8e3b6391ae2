"""Target models: profiles, fetching, loading, engine processes, memory and disk plans."""
