# cadre_test(NAME name [SHARDS n] COMMAND command... PROPERTIES property value...): a test of CTest
# whose seconds are kept for tools/budgets. With SHARDS the program is one of GoogleTest and runs as n
# processes at once, for tests that mostly wait. CTest runs two tests at once (CMakePresets.json), but
# nothing beside a test with RUN_SERIAL, which has limits in seconds.
function(cadre_test)
  cmake_parse_arguments(PARSE_ARGV 0 test "" "NAME;SHARDS" "COMMAND;PROPERTIES")
  if(NOT test_SHARDS)
    set(test_SHARDS 1)
  endif()
  add_test(NAME ${test_NAME}
           COMMAND python3 ${CMAKE_SOURCE_DIR}/tests/run_test.py
                   ${CMAKE_BINARY_DIR}/test_seconds/${test_NAME}.json ${test_SHARDS} ${test_COMMAND})
  set_tests_properties(${test_NAME} PROPERTIES ${test_PROPERTIES})
  # Under a sanitizer a share of the seeds, dtypes and operations. The simulator runs one thread at a
  # time, and arithmetic, the rings' bytes and Python's peers have none that it could see; and where
  # four or five ranks race, seven or nine show no more. Whether the simulator finds planted defects is
  # a property of its schedules, which no sanitizer changes.
  if(CADRE_SANITIZE MATCHES "thread")
    set_property(TEST ${test_NAME} APPEND PROPERTY ENVIRONMENT CADRE_SIM_SEEDS=5 CADRE_CASES_ONE_IN=8
        GTEST_FILTER=-*Simulator*:ReduceTest.*:*/NumericsTest.*:*/ScheduleTest.*:PackedShape.*:RingTest.*:TorchPeerTest.*:Ranks/*/7:Ranks/*/9)
  elseif(CADRE_SANITIZE)
    set_property(TEST ${test_NAME} APPEND PROPERTY ENVIRONMENT CADRE_SIM_SEEDS=25 CADRE_CASES_ONE_IN=4
        GTEST_FILTER=-PlantedBugs.*)
  endif()
endfunction()
