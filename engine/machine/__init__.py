"""What a machine is and can do: profiles, presets, probes, limits, the compute device."""
