"""One message layer over two transports: protobuf to and from the model, gRPC and length-prefixed frames.

Code generated from protos/ lies in tao.wire.v1 and is never edited. Roles see one port and do not know which
transport carried a request; both are held to one conformance suite. What a request means is for the roles to say.
"""
