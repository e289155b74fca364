"""From a recipe and a machine to a plan, and plans of many models: what is decided and how it is shown."""
