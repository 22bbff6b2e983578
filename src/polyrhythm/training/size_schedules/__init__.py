"""The size schedules: every module is one choice, such as `progressive(sizes=[128, 160], until=[0.4, 0.7])`."""
