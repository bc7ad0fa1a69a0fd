# cadre_test(NAME name [SHARDS n] [ONE_IN n] COMMAND command... PROPERTIES property value...): adds a
# test to CTest and records its run time for tools/budgets.py. With SHARDS a GoogleTest program runs
# as n processes at once, for tests that mostly wait. With ONE_IN .ci/run runs one in n of its tests,
# others for each commit; a call of ctest runs all. Under sanitizers ONE_IN is at least 2. CTest runs two tests at once (CMakePresets.json),
# but runs a test with RUN_SERIAL, which checks time limits, alone.
function(cadre_test)
  cmake_parse_arguments(PARSE_ARGV 0 test "" "NAME;SHARDS;ONE_IN" "COMMAND;PROPERTIES")
  if(NOT test_SHARDS)
    set(test_SHARDS 1)
  endif()
  if(NOT test_ONE_IN)
    set(test_ONE_IN 1)
  endif()
  if(CADRE_SANITIZE AND test_ONE_IN LESS 2)
    set(test_ONE_IN 2)
  endif()
  add_test(NAME ${test_NAME}
           COMMAND python3 ${CMAKE_SOURCE_DIR}/tests/run_test.py
                   ${CMAKE_BINARY_DIR}/test_seconds/${test_NAME}.json ${test_SHARDS} ${test_ONE_IN}
                   ${test_COMMAND})
  set_tests_properties(${test_NAME} PROPERTIES ${test_PROPERTIES})
  # Under ThreadSanitizer only a part of the seeds, dtypes and operations is tested. Left out are
  # tests in which ThreadSanitizer cannot find races: the simulator runs one thread at a time, and
  # tests of arithmetic, of a ring's bytes and of Python peers have no threads of ours. Runs with 7
  # or 9 ranks show no races beyond those of 4 or 5. Under other sanitizers PlantedBugs is left out:
  # whether the simulator finds planted defects depends on its schedules, not on a sanitizer.
  if(CADRE_SANITIZE MATCHES "thread")
    set_property(TEST ${test_NAME} APPEND PROPERTY ENVIRONMENT CADRE_SIM_SEEDS=5 CADRE_CASES_ONE_IN=8
        GTEST_FILTER=-*Simulator*:ReduceTest.*:*/NumericsTest.*:*/ScheduleTest.*:PackedShape.*:RingTest.*:TorchPeerTest.*:Ranks/*/7:Ranks/*/9)
  elseif(CADRE_SANITIZE)
    set_property(TEST ${test_NAME} APPEND PROPERTY ENVIRONMENT CADRE_SIM_SEEDS=25 CADRE_CASES_ONE_IN=4
        GTEST_FILTER=-PlantedBugs.*)
  endif()
endfunction()
