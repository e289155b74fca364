"""What completions are worth: functions and programs of the user, each in processes of its own."""
