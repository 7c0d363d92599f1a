"""rayapi"""
