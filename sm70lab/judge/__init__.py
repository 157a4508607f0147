"""Pure functions from records to a verdict: text shape, acceptance, losslessness audit."""
