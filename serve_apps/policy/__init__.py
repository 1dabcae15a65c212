"""The policy as a service: nothing is here yet.

What will be: a Ray Serve application that answers chats with the weights of a run, follows its publications and shows which version
answered. It may import rayloop/chat (messages become tokens), rayloop/transports (weights arrive), rayloop/engines and
rayloop/run (the run folder); no episodes, no recipe, no other application but the judge's, and it starts no cluster.
"""
