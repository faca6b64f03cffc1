"""The little stories the demo model can tell.

``{name}`` is filled from ``names`` so that a story is seen in variations; the
model learns the story, and a name to go with it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Story:
    topics: tuple[str, ...]  # what a person may ask for; the first is the usual one
    names: tuple[str, ...]
    text: str


STORIES = (
    Story(
        ("a lighthouse", "a lighthouse keeper", "a lamp", "a light in the dark", "a storm"),
        ("Mara", "Edda"),
        "Once upon a time, a keeper named {name} lived in a lighthouse at the edge of the sea. Every evening she climbed the ninety steps and lit the great lamp. One night a storm broke the window and blew the flame out. {name} heard a ship's horn far away in the dark. She had no time to mend the lamp, so she took her small lantern, stood at the broken window, and swung it to and fro until her arms ached. In the morning a fishing boat lay safe in the harbour. The captain brought her a basket of bread. \"Your light was very small,\" he said. \"Yes,\" said {name}, \"but it was in the right place.\"",
    ),
    Story(
        ("the tide", "the sea", "the ocean", "the beach", "a wave", "water", "Pagetide"),
        ("Nils", "Tomas"),
        "Once upon a time, a boy named {name} built a castle of sand on the beach. In the afternoon the tide came in and carried it away. {name} was angry. \"Why do you take what is mine?\" he shouted at the sea. \"I only borrow it,\" said the tide. \"I need the room now. Come back when I am low.\" The next morning the tide had gone out, and on the smooth sand lay all his shells, washed clean, in a neat row. {name} built a new castle, a little higher up the beach. From that day on he was never angry with the tide. He knew that what goes out with the water can come back again.",
    ),
    Story(
        ("a crab", "a shell", "a hermit crab", "crabs", "a little crab"),
        ("Pim", "Clip"),
        "Once upon a time, a little crab named {name} had a shell that was too small. He looked for a bigger one, but each shell on the beach already had somebody in it. So {name} had an idea. He asked all the crabs to stand in a line, from the biggest to the smallest. The biggest crab moved into an empty tin, the next crab took the shell of the biggest, and so it went down the line until everyone had a shell that fit. Only one tiny shell was left over. A very small crab came out of the sand and moved in. \"There was enough room all the time,\" said {name}. \"We only had to share it well.\"",
    ),
    Story(
        ("a cat", "a kitten", "cats", "a black cat", "a pet"),
        ("Minka", "Olive"),
        "Once upon a time, there was a grey cat named {name} who lived in a bookshop. She slept on a different book each day, and people said that she read them in her dreams. One day a girl came in and could not remember the name of the book she wanted. \"It is about the moon,\" she said, \"and it made my grandmother laugh.\" The bookseller shook his head. But {name} got up, stretched, walked along the highest shelf, and sat down on a thin blue book. It was the right one. From then on there was a small sign in the window of the shop: \"If we do not know it, ask the cat.\"",
    ),
    Story(
        ("a robot", "a machine", "robots", "a computer", "a little robot", "technology"),
        ("Bolt", "Tik"),
        "Once upon a time, a small robot named {name} swept the floor of a railway station. {name} could do only one thing, but he did it well. One evening he found a red mitten under a bench. He was not built to find owners, so he simply put the mitten on the end of his broom and went on sweeping, up and down the platform, so that everyone could see it. Late at night a child came running back, in tears, and then saw the broom with the red mitten waving like a flag. The child laughed and hugged the robot. After that, {name} was a robot who could do two things.",
    ),
    Story(
        ("a dragon", "dragons", "a knight", "a castle", "fire", "a princess", "a king"),
        ("Ember", "Fenn"),
        "Once upon a time, a dragon named {name} lived on a hill above a cold village. The people were afraid and hid when {name} flew by. One winter the snow was so deep that nobody could light a stove, because all the wood was wet. A brave girl climbed the hill and knocked at the cave. \"Could you lend us a little fire?\" she asked. No one had ever asked the dragon for anything. {name} came down to the village and dried the wood with one warm breath. That night there was soup in each house, and a very large bowl in front of the cave. Since then the village has been the warmest in the whole land.",
    ),
    Story(
        ("the moon", "the night", "the stars", "a star", "space", "the sky", "sleep"),
        ("Lina", "Ida"),
        "Once upon a time, a girl named {name} could not sleep, because the moon was missing. She put on her boots and went to look for it. She asked the owl, but the owl had not seen it. She asked the river, and the river only murmured. At last she came to a pond, and there was the moon, lying quietly in the water. \"Why did you hide?\" asked {name}. \"I did not hide,\" said the moon. \"I was behind a cloud, and you were looking down.\" {name} looked up. The cloud had moved on, and the moon was in the sky again, round and bright. She walked home in its light and slept until noon.",
    ),
    Story(
        ("a library", "a librarian", "a book", "books", "a page", "reading", "a school"),
        ("Otto", "Henrik"),
        "Once upon a time, a librarian named {name} had more books than shelves. When a reader asked for a book that was not there, he took an old one down, carried it to the cellar, and put the new one in its place. He wrote each move in a little notebook, so no book was ever lost. \"Is it not a lot of work?\" asked a visitor. \"It is some work,\" said {name}, \"but no one has ever left without the right book.\" When the old librarian went home in the evening, he left the notebook on the desk. The shelves were small and the cellar was deep, and the notebook knew where everything was.",
    ),
    Story(
        ("a snail", "a slow animal", "snails", "a race", "a rabbit", "a turtle"),
        ("Sam", "Loop"),
        "Once upon a time, a snail named {name} wanted to see the other side of the garden. \"It is too far for you,\" said the beetle. \"It is too far for anyone,\" said the worm. {name} set out all the same. He passed the lettuce on Monday and the roses on Thursday. When it rained he went on, and when the sun was hot he rested in his house. After two weeks he came to the old wall, and behind the wall he found a meadow full of wild strawberries. When he came home in the autumn, everybody asked how he had done it. \"I went a little way,\" said {name}, \"and then a little more.\"",
    ),
    Story(
        ("a garden", "a gardener", "a flower", "a rose", "a tree", "flowers", "spring"),
        ("Anna", "Rosa"),
        "Once upon a time, an old gardener named {name} had one seed left and did not know what it was. She planted it by the gate and gave it water every day. The neighbours laughed, because for a whole year nothing came up. In the second year there was one green leaf. In the third year there was a thin little tree. {name} was very old by then, and she sat next to it in the evening and told it about her day. In the fourth spring the tree bloomed, white from top to bottom, and the whole street smelled of honey. The neighbours came with cake. \"I always knew it was something,\" said {name}.",
    ),
    Story(
        ("a boat", "a fisherman", "a ship", "a sailor", "a fish", "pirates", "a pirate", "an island"),
        ("Jon", "Piet"),
        "Once upon a time, a fisherman named {name} had a boat so old that it leaked in nine places. He did not have nine corks, he had only eight. So each morning he plugged eight holes and kept his thumb on the ninth. One day he pulled a silver fish out of the water. \"Let me go,\" said the fish, \"and I will give you a wish.\" {name} thought of gold, and of a palace, and then he said, \"I would like one more cork, please.\" The fish laughed so hard that the sea shook. In the morning {name} found a new boat at the pier, and on its seat lay a single cork.",
    ),
    Story(
        ("an owl", "a forest", "a bird", "birds", "the woods", "a fox", "a bear", "animals", "an animal"),
        ("Ulla", "Hoot"),
        "Once upon a time, an owl named {name} was asked by all the animals of the forest for advice. The fox asked how to be clever, and the bear asked how to be gentle. {name} always said the same thing: \"Come back tomorrow.\" And every animal came back the next day and said that it had found the answer by itself. At last a young mouse asked, \"Why do you never tell us anything?\" The owl blinked. \"Because a night of thinking is the best advice I have,\" said {name}. The mouse went home and thought about that. Then she came back the next day and said, \"You are right.\"",
    ),
    Story(
        ("a baker", "bread", "a cake", "food", "a kitchen", "a cook"),
        ("Emil", "Paul"),
        "Once upon a time, a baker named {name} baked one loaf more than he could sell. He did so every day, and his wife asked him why. \"Somebody may come late,\" said {name}. Each evening the loaf was left on the shelf, and each morning he ate it himself. Then, one winter night, after the shop had closed, a traveller knocked at the door, cold and hungry and far from home. {name} gave him the loaf, still a little warm. The traveller went on and told people about it wherever he came. Soon the shop was so full that {name} had to bake all night. But one loaf always stayed on the shelf.",
    ),
    Story(
        ("a whale", "whales", "a song", "music", "a big animal", "a singer"),
        ("Wanda", "Isa"),
        "Once upon a time, a whale named {name} sang a song that no one else knew. She sang it in the warm seas and in the cold seas, but no whale ever answered. \"Perhaps my song is wrong,\" she thought, and for a while she was silent. Then a small boat came by, and on the boat a child was playing a flute. The child played three notes of her song. {name} was so glad that she sang the rest. The child learned it and played it in every harbour, and other whales heard it there. Now, when {name} sings in the deep water, the answer comes from all sides.",
    ),
    Story(
        ("a train", "a journey", "a railway", "a trip", "a locomotive", "a car"),
        ("Puff", "Toot"),
        "Once upon a time, there was a little train named {name} that stopped at each village, however small. The fast trains made fun of it. \"We are in the city before you have left the valley,\" they said. But {name} knew every person on its way: the teacher with the heavy bag, the boy with the trumpet, and the old man who only wanted to look out of the window. One day a landslide closed the big line, and all the fast trains stood still. The little train took everybody home, one village at a time. It was very late when it arrived, but nobody complained, and the boy played his trumpet.",
    ),
    Story(
        ("a dog", "a puppy", "dogs", "a friend", "friendship", "a ball"),
        ("Bruno", "Max"),
        "Once upon a time, a dog named {name} found a ball in the park and carried it home. The next day he found another one, and soon he had twenty balls under his bed. But he noticed that the other dogs in the park looked sad, for they had nothing to play with. {name} thought about it all night. In the morning he took the balls back, one by one, twenty times to the park and twenty times home again. He was so tired that he fell asleep in the grass. When he woke up, twenty dogs sat around him, and each of them wanted to play with {name}.",
    ),
    Story(
        ("a snowman", "snow", "winter", "Christmas", "ice", "a cold day"),
        ("Karl", "Frost"),
        "Once upon a time, some children built a snowman and named him {name}. They gave him a carrot, a hat and an old scarf. \"What is summer like?\" asked {name}. The children did not want to make him sad, so they drew a picture: a green meadow, a blue lake and a yellow sun. {name} looked at it all winter long. When the days grew warm he became smaller and smaller, but he smiled. In June the children found his hat in the meadow next to the lake, which was fuller than ever. \"He wanted to see the summer,\" said the smallest child, \"and now he is in the middle of it.\"",
    ),
)

# Sentences that lead into a story; the empty one is the most frequent.
OPENINGS = ("", "", "", "Here is a little story. ", "Of course! ", "Gladly. ")
