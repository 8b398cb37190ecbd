"""Plans: what fits into device memory and how long it takes. All such decisions are made here."""
