"""What all dialects share on the device: records, schedules, scores, the softmax, output, number formats, merging.

It imports launching and nothing else of ours: who calls is not its business.
A new mask or modifier is a function in scores.py or schedule.py and a field in records.py.
"""
