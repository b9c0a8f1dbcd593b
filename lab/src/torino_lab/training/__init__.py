"""Train the miniature LLaVA from pretrained parts on two cores."""
