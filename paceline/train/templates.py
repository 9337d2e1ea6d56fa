"""Chat prompts from forms and topics of our own, to go with the question lists of other people."""

from __future__ import annotations

import random
from collections.abc import Iterator

TOPICS = (
    "black holes", "coffee", "the French Revolution", "jazz music", "remote work", "gravity", "opera", "volcanoes",
    "bicycles", "electric cars", "the Roman Empire", "photosynthesis", "chess", "sleep", "sourdough bread",
    "honey bees",
    "the stock market", "public libraries", "coral reefs", "vaccines", "the printing press", "soccer", "camping",
    "renewable energy", "the Silk Road", "poetry", "robots", "dreams", "glaciers", "time zones", "migration of birds",
    "urban gardening", "the human heart", "satellites", "tea", "folk tales", "memory", "rivers", "inflation", "tides",
    "cheese making", "marathons", "deserts", "the Olympic Games", "origami", "antibiotics", "whales", "photography",
    "the water cycle", "street food", "languages", "earthquakes", "kindness", "the moon landing", "mathematics",
    "film music", "recycling", "lighthouses", "the internet", "winter", "elephants", "architecture", "good manners",
    "space telescopes",
)  # fmt: skip

FORMS = (
    "Explain {topic} to a ten-year-old.",
    "Write a short poem about {topic}.",
    "Write a persuasive speech about why {topic} matters.",
    "Outline a short documentary about {topic}.",
    "List five surprising facts about {topic}.",
    "What are the most common misconceptions about {topic}?",
    "Write a polite email to a colleague asking for help with a presentation on {topic}.",
    "Give three examples of how {topic} affects daily life, in JSON with the keys 'example' and 'effect'.",
    "Make a table with pros and cons about {topic}.",
    "Write a dialogue between a teacher and a student about {topic}.",
    "Summarise what is known about {topic} in four sentences.",
    "Suggest a title and an abstract for an essay about {topic}.",
    "Write the opening paragraph of a short story in which {topic} plays a part.",
    "Compare {topic} with {other}. What do they have in common?",
    "Write five quiz questions about {topic}, with answers.",
    "How would you teach a lesson about {topic}? Give a plan in steps.",
    'Rewrite this sentence in a formal style: "{topic} is way more fun than people think, you know."',
    "What should a beginner read first about {topic}, and why?",
    "Imagine that {topic} had never existed. How would the world differ?",
    "Write a product description for a board game about {topic}.",
    "Act as a travel guide and recommend a weekend for somebody who likes {topic}.",
    "Describe {topic} from the point of view of a historian of the far future.",
)  # fmt: skip


def template_prompts(rng: random.Random) -> Iterator[str]:
    """Every form with every topic, in an order drawn from ``rng``."""
    pairs = [(form, topic) for form in FORMS for topic in TOPICS]
    rng.shuffle(pairs)
    for form, topic in pairs:
        yield form.format(topic=topic, other=rng.choice([t for t in TOPICS if t != topic]))
