"""The main job from end to end: a real checkpoint becomes a universal folder, or is refused."""
